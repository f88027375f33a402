"""The forest plot: each arm's paired difference to the baseline, a panel a measure.

A point is the mean of the differences over seeds, its line their 95% interval, and the vertical
line no difference. Filled are those that the comparison marks, which it does only where the
interval excludes zero after correction for the number of arms. Ratios are on a log scale, where a
doubling is as far from 1 as a halving.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lightning_qrl.reports.comparison import Comparison, Difference
from lightning_qrl.reports.figures import BLUE, VERMILION
from lightning_qrl.reports.measures import Measure
from lightning_qrl.reports.numbers import difference_text, plain, shortened
from lightning_qrl.reports.page.chart import Chart, Margins, Panel
from lightning_qrl.reports.page.look import (
    INK,
    MUTED,
    NORMAL,
    PAPER,
    frame,
    linear_ticks,
    log_ticks,
    number,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.2  # inches of an arm
LONGEST = 28  # characters of a name
LARGEST = 300.0  # logarithm of a ratio that an axis goes to
BEYOND = 20.0  # times the middle arm's reach: an axis does not follow
Row = tuple[str, Difference | None]


def forest(comparison: Comparison) -> Chart | None:
    """The forest plot; None if there is no difference to show."""
    arms = comparison.arms[1:]
    panels = []
    for measure in comparison.measures:
        rows = [(arm.name, comparison.differences.get((arm.name, measure.key))) for arm in arms]
        if any(known(difference) for _, difference in rows):
            about = "; ".join(
                f"{plain(name)} {difference_text(measure, difference)}" for name, difference in rows
            )
            panels.append(Panel(measure.label, about, partial(_draw, measure=measure, rows=rows)))
    if not panels:
        return None
    margins = Margins(left=1.72, right=0.12, top=0.3, bottom=0.42)
    height = margins.top + margins.bottom + ROW * (len(arms) + 0.6)
    caption = (
        f"Mean paired difference to the baseline, {plain(comparison.baseline.name)}, over seeds, "
        "with its 95% bootstrap interval. Filled: the interval excludes zero after correction for "
        "the number of arms (Holm). Hollow: no difference was shown. Grey: one pair, no interval. "
        "An arrow: the interval goes on."
    )
    title = f"Paired differences to {shortened(comparison.baseline.name, 60)}"
    return Chart("differences", title, caption, tuple(panels), 3.6, height, margins)


def known(difference: Difference | None) -> bool:
    """Whether there is a point to draw."""
    return difference is not None and math.isfinite(difference.mean)


def _draw(axes: "Axes", measure: Measure, rows: Sequence[Row]) -> None:
    low, high = _limits([difference for _, difference in rows if difference is not None])
    if measure.scale == "ratio":
        low, high = max(low, -LARGEST), min(high, LARGEST)
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _frame(axes, measure, [name for name, _ in rows], low, high)
    axes.axvline(0, color=INK, lw=0.8)
    for place, (_, difference) in enumerate(rows):
        if difference is None or not known(difference):
            said = "no pair" if difference is None or not difference.pairs else "not finite"
            axes.text(0, place, f" {said}", color=MUTED, va="center")
        else:
            _draw_row(axes, place, difference, low, high)


def _draw_row(axes: "Axes", place: int, difference: Difference, low: float, high: float) -> None:
    alone = math.isnan(difference.low) or math.isnan(difference.high)
    colour = VERMILION if difference.marked else MUTED if alone else BLUE
    if not alone:
        ends = [max(difference.low, low), min(difference.high, high)]
        axes.plot(ends, [place, place], "-", color=colour, lw=1.3, solid_capstyle="butt")
        for end, beyond, mark in (
            (low, difference.low < low, "<"),
            (high, difference.high > high, ">"),
        ):
            if beyond:
                axes.plot(end, place, mark, color=colour, ms=4, clip_on=False)
    if low <= difference.mean <= high:
        fill = colour if difference.marked else PAPER
        axes.plot(difference.mean, place, "o", color=colour, ms=4.6, mfc=fill, mew=1.1, zorder=3)


def _limits(differences: Sequence[Difference]) -> tuple[float, float]:
    """Around all intervals and zero, but for what is far beyond the others."""
    ends = np.array([(d.mean, d.low, d.high) for d in differences])
    ends = np.where(np.isfinite(ends), ends, np.nan)
    reach = np.nanmax(np.abs(ends[~np.isnan(ends).all(axis=1)]), axis=1)
    bound = BEYOND * float(np.median(reach[reach > 0])) if (reach > 0).any() else 1.0
    low, high = max(min(0.0, np.nanmin(ends)), -bound), min(max(0.0, np.nanmax(ends)), bound)
    room = 0.08 * (high - low) or 1.0
    return float(low - room), float(high + room)


def _frame(axes: "Axes", measure: Measure, names: Sequence[str], low: float, high: float) -> None:
    arrow = {"higher": " (better →)", "lower": " (← better)", None: ""}[measure.better]
    up = {float(place): shortened(name, LONGEST) for place, name in enumerate(names)}
    if measure.scale == "ratio":
        found = log_ticks(math.exp(low), math.exp(high))
        found = found if len(found) > 1 else linear_ticks(math.exp(low), math.exp(high), 3)
        along = {math.log(tick): f"×{number(tick)}" for tick in found}
        label = f"times the baseline{arrow}"
    else:
        along = {tick: number(tick) for tick in linear_ticks(low, high, 3)}
        label = f"difference{', ' if measure.unit else ''}{measure.unit}{arrow}"
    frame(axes, along, up, label, lines="x")
    axes.text(0, 1.03, measure.label, transform=axes.transAxes, va="bottom", weight="bold",
              size=NORMAL)  # fmt: skip
