"""What is drawn over steps, and the axes that the panels of a chart share.

A diverged run may reach 1e30. On a log scale the axis follows up to a thousand times what the
middle run reaches, and down to a thousandth of it; so one such run does not flatten the others.

A log scale has no zero, but a mismatch or a gradient norm is zero at many a step: where no group
has a signal, or nothing is rounded. Such steps lie on the lower edge, which is then ticked "0", a
little below all that is above it; and a line goes on through them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_qrl.reports.measures import ENTROPY, HELD_OUT, MISMATCH, NORM, TRAINING
from lightning_qrl.reports.page.look import Ticks, frame, linear_ticks, log_ticks, number
from lightning_qrl.reports.page.series import Band, Floats, band_for
from lightning_qrl.tracking.histories import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEYOND = 1e3  # times what the middle run reaches: an axis does not follow
BELOW = 0.16  # of the height of the positive values, in logarithms: zero lies below them
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
    Quantity("held_out_reward", HELD_OUT, "Held-out reward"),
    Quantity("reward", TRAINING, "Training reward, smoothed", smooth=True),
    Quantity("gradient_norm", NORM, "Gradient norm before clipping", log=True, single=True),
    Quantity(
        "mismatch",
        MISMATCH,
        "Mismatch of trainer and sampler: mean |Δlogprob|",
        log=True,
    ),
    Quantity(
        "k3_kl",
        "rollout_corr/k3_kl",
        "Mismatch of trainer and sampler: K3 estimate of the KL divergence",
        log=True,
    ),
    Quantity("entropy", ENTROPY, "Entropy of the policy (nats a token)"),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """What the panels of a chart share.

    Attributes:
        quantity: what is drawn.
        band: around a mean.
        steps: the first and the last.
        values: limits of the vertical axis.
        ticks: along and up, each with its text.
        zero: where zero lies on a log scale, None where none is drawn.
    """

    quantity: Quantity
    band: Band
    steps: tuple[float, float]
    values: tuple[float, float]
    ticks: tuple[Ticks, Ticks]
    zero: float | None = None

    def place(self, values: Floats) -> Floats:
        """Where values lie: on a log scale with a zero, zero and less on the lower edge."""
        if self.zero is None:
            return values
        above = np.maximum(values, 1.2 * self.zero)  # of positive ones, none lies on the edge
        return np.where(values <= 0, self.zero, above)


def axis_for(quantity: Quantity, data: Data) -> Axis:
    """Axes that fit all the histories of a quantity."""
    every = [history for own in data.values() for history in own.values()]
    known = [history.values[np.isfinite(history.values)] for history in every]
    shown = [values[values > 0] for values in known] if quantity.log else known
    lows, highs = np.array([(values.min(), values.max()) for values in shown if values.size]).T
    first, last = min(h.steps[0] for h in every), max(h.steps[-1] for h in every)
    first = min(first, 0) if first < 0.1 * last else first  # from 1 on is from the start on
    steps = (float(first), float(max(last, first + 1)))
    zero = None
    if quantity.log:
        low, high = _log_limits(lows, highs)
        up = {tick: number(tick) for tick in log_ticks(low, high)}
        if any((values <= 0).any() for values in known):
            zero = low / max(2.0, (high / low) ** BELOW)
            up[zero] = "0"
        limits = (low if zero is None else 0.9 * zero, high)
    else:
        low, high = float(lows.min()), float(highs.max())
        room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        limits = (low - room, high + room)
        up = {tick: number(tick) for tick in linear_ticks(*limits, 4)}
    band = band_for([len(own) for own in data.values()])
    band = "range" if quantity.log and band == "interval" else band
    along = {tick: number(tick) for tick in linear_ticks(*steps, 4)}
    return Axis(quantity, band, steps, limits, (along, up), zero)


def _log_limits(lows: Floats, highs: Floats) -> tuple[float, float]:
    """Around the positive values, with some room, given the smallest and largest of each run."""
    low = max(float(lows.min()), float(np.median(lows)) / BEYOND)
    high = max(min(float(highs.max()), float(np.median(highs)) * BEYOND), 1.01 * low)
    room = (high / low) ** 0.06
    return low / room, high * room


def dress(axes: "Axes", axis: Axis) -> None:
    """Scale, limits and ticks."""
    if axis.quantity.log:
        axes.set_yscale("log")
    room = 0.02 * (axis.steps[1] - axis.steps[0])
    axes.set_xlim(axis.steps[0] - room, axis.steps[1] + room)
    axes.set_ylim(*axis.values)
    frame(axes, *axis.ticks, "optimizer step", lines="y")
