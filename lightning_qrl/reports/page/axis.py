"""What is drawn over steps, and the axes that the panels of a chart share.

A diverged run may reach 1e30. On a log scale the axis follows up to a thousand times what the
middle run reaches, and down to a thousandth of it; so one such run does not flatten the others.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_qrl.reports.page.look import frame, linear_ticks, log_ticks, number
from lightning_qrl.reports.page.series import Band, band_for, finite
from lightning_qrl.tracking.histories import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEYOND = 1e3  # times what the middle run reaches: an axis does not follow
Data = dict[str, dict[int, History]]  # by arm, by seed


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is drawn over steps.

    Attributes:
        key: names the chart's file.
        metric: where its values are.
        title: of the chart.
        log: whether on a log scale.
        smooth: whether a moving mean is drawn.
        single: whether every seed is drawn and no mean, with the spikes marked.
    """

    key: str
    metric: str
    title: str
    log: bool = False
    smooth: bool = False
    single: bool = False


QUANTITIES = (
    Quantity("held_out_reward", "eval/reward", "Held-out reward"),
    Quantity("reward", "train/reward", "Training reward, smoothed", smooth=True),
    Quantity(
        "gradient_norm", "train/grad_norm", "Gradient norm before clipping", log=True, single=True
    ),
    Quantity(
        "mismatch",
        "train/sampling/sampling_logp_difference/mean",
        "Mismatch of trainer and sampler: mean |Δlogprob|",
        log=True,
    ),
    Quantity(
        "k3_kl",
        "rollout_corr/k3_kl",
        "Mismatch of trainer and sampler: K3 estimate of the KL divergence",
        log=True,
    ),
    Quantity("entropy", "train/entropy", "Entropy of the policy (nats a token)"),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """What the panels of a chart share."""

    quantity: Quantity
    band: Band
    steps: tuple[float, float]
    values: tuple[float, float]
    ticks: tuple[list[float], list[float]]


def axis_for(quantity: Quantity, data: Data) -> Axis:
    """Axes that fit all the histories of a quantity."""
    every = [history for own in data.values() for history in own.values()]
    shown = [finite(history.values, quantity.log) for history in every]
    shown = [values for values in shown if not np.isnan(values).all()]
    lows, highs = np.array([(np.nanmin(v), np.nanmax(v)) for v in shown]).T
    low, high = float(lows.min()), float(highs.max())
    first, last = min(h.steps[0] for h in every), max(h.steps[-1] for h in every)
    first = min(first, 0) if first < 0.1 * last else first  # from 1 on is from the start on
    steps = (float(first), float(max(last, first + 1)))
    if quantity.log:
        low = max(low, float(np.median(lows)) / BEYOND)
        high = max(min(high, float(np.median(highs)) * BEYOND), 1.01 * low)
        room = (high / low) ** 0.06
        limits = (low / room, high * room)
        ticks = log_ticks(*limits)
    else:
        room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        limits = (low - room, high + room)
        ticks = linear_ticks(*limits, 4)
    band = band_for([len(own) for own in data.values()])
    return Axis(quantity, band, steps, limits, (linear_ticks(*steps, 4), ticks))


def dress(axes: "Axes", axis: Axis) -> None:
    """Scale, limits and ticks."""
    if axis.quantity.log:
        axes.set_yscale("log")
    room = 0.02 * (axis.steps[1] - axis.steps[0])
    axes.set_xlim(axis.steps[0] - room, axis.steps[1] + room)
    axes.set_ylim(*axis.values)
    along, up = ({tick: number(tick) for tick in ticks} for ticks in axis.ticks)
    frame(axes, along, up, "optimizer step", lines="y")
