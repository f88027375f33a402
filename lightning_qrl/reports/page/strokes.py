"""How the runs of an arm are drawn: mean and band, single seeds, and what fits on no axis.

NaN and infinity have no place on an axis. What is infinite or beyond it is a triangle at its edge,
and where values cease to be numbers stands a cross. Where zero lies on a log scale: see `axis`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_qrl.reports.figures import VERMILION
from lightning_qrl.reports.measures import is_spike
from lightning_qrl.reports.page.axis import Axis
from lightning_qrl.reports.page.look import INK, PAPER
from lightning_qrl.reports.page.series import finite, spread, thinned, thinned_band
from lightning_qrl.tracking.histories import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEDS_SHOWN = 5  # more thin lines than that are a smear
FEW_POINTS = 30  # up to which each is marked
Seeds = dict[int, History]


@dataclass(frozen=True, slots=True)
class Pen:
    """How an arm is drawn."""

    colour: str
    line: str = "-"
    marker: str = "o"


BASELINE = Pen(INK)


def few(own: Seeds) -> bool:
    """Whether each point is marked."""
    return all(len(history.steps) <= FEW_POINTS for history in own.values())


def draw_behind(axes: "Axes", own: Seeds, axis: Axis) -> None:
    """The baseline, for comparison: its mean and band, or the range of its runs."""
    if own:
        _draw_mean(axes, own, BASELINE, axis, width=0 if axis.quantity.single else 0.9)


def draw(axes: "Axes", own: Seeds, pen: Pen, axis: Axis, *, faint: bool = False) -> None:
    """An arm: its mean and band, its seeds, and what does not fit on the axes.

    Args:
        axes: what to draw on.
        own: its runs.
        pen: how.
        axis: limits and scale of the axes.
        faint: whether the seeds beside a mean are to be hardly seen, among those of other arms.
    """
    single = axis.quantity.single or len(own) == 1
    if own and not single:
        _draw_mean(axes, own, pen, axis, width=1.5)
    if single or len(own) <= SEEDS_SHOWN:
        for history in own.values():
            alpha = 1.0 if len(own) == 1 else 0.25 if faint and not single else 0.6
            _draw_line(axes, history, pen, axis, alone=len(own) == 1, alpha=alpha)
    for history in own.values():
        if axis.quantity.single:
            _mark_spikes(axes, history, axis)
        _mark_edges(axes, history, pen, axis)


def _draw_mean(axes: "Axes", own: Seeds, pen: Pen, axis: Axis, width: float) -> None:
    band = "range" if axis.quantity.single else axis.band
    over = spread(list(own.values()), band)
    if len(own) > 1:
        steps, low, high = thinned_band(over)
        axes.fill_between(
            steps, axis.place(low), axis.place(high), color=pen.colour, alpha=0.16, lw=0
        )
    if not width:
        return
    line = thinned(History(over.steps, axis.place(over.middle)))
    marker = pen.marker if few(own) else ""
    axes.plot(*line, pen.line, color=pen.colour, lw=width, marker=marker, ms=2.8)


def _draw_line(
    axes: "Axes", history: History, pen: Pen, axis: Axis, *, alone: bool, alpha: float
) -> None:
    """One run; a point between two gaps, which no line reaches, is a dot."""
    line = thinned(History(history.steps, axis.place(finite(history.values))))
    known = np.pad(np.isfinite(line.values), 1)
    dots = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])
    marked = alone and len(line.steps) <= FEW_POINTS
    axes.plot(
        *line,
        pen.line if alone or axis.quantity.single else "-",
        color=pen.colour,
        lw=1.2 if alone else 0.7,
        alpha=alpha,
        marker=pen.marker if marked else ".",
        ms=2.8,
        markevery=None if marked else dots.tolist(),
    )


def _mark_spikes(axes: "Axes", history: History, axis: Axis) -> None:
    high = is_spike(history) & (history.values <= axis.values[1])
    if high.any():
        at = history.steps[high], history.values[high]
        axes.plot(*at, "o", color=VERMILION, ms=3.2, mfc=PAPER, mew=0.9, zorder=3)


def _mark_edges(axes: "Axes", history: History, pen: Pen, axis: Axis) -> None:
    """What is above the axis or endlessly below it, and where values cease to be numbers."""
    edge = axes.get_xaxis_transform()
    for mark, height, there in (
        ("^", 0.98, history.values > axis.values[1]),
        ("v", 0.02, np.isneginf(history.values)),
        ("x", 0.9, np.isnan(history.values)),
    ):
        steps = history.steps[_starts(there)]
        if len(steps):
            axes.plot(
                steps, np.full(len(steps), height), mark, color=pen.colour, ms=4, transform=edge,
                mew=1.0, clip_on=False, zorder=3,
            )  # fmt: skip


def _starts(there: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The first of each unbroken streak."""
    before = np.concatenate(([False], there[:-1]))
    return there & ~before
