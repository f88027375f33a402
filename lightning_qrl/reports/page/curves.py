"""The charts of quantities over steps: a panel an arm, or all arms in one where they are few.

With more than three arms each has a panel of its own, on one pair of axes for all, in which the
baseline is drawn too: seven lines over each other show less than seven panels. With up to three
they share a panel, told apart by colour, line style and marker.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lightning_qrl.reports.comparison import Arm, Comparison
from lightning_qrl.reports.figures import BLUE, VERMILION
from lightning_qrl.reports.measures import SPIKE
from lightning_qrl.reports.numbers import plain, shortened
from lightning_qrl.reports.page.axis import QUANTITIES, Axis, Data, Quantity, axis_for, dress
from lightning_qrl.reports.page.chart import Chart, Margins, Panel
from lightning_qrl.reports.page.look import MUTED, NORMAL, on_two_lines
from lightning_qrl.reports.page.series import smoothed
from lightning_qrl.reports.page.strokes import BASELINE, SEEDS_SHOWN, Pen, draw, draw_behind, few
from lightning_qrl.tracking.histories import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOGETHER = 3  # arms that share a panel
TITLE = 35  # characters of a line above a panel
PENS = (BASELINE, Pen(VERMILION, "--", "s"), Pen(BLUE, "-.", "^"))  # of arms in one panel
ALONE = Pen(BLUE, "-", "s")  # of an arm beside the baseline


def curves(comparison: Comparison) -> list[Chart]:
    """A chart for each quantity that some run has a value of."""
    charts = []
    for quantity in (*QUANTITIES, *_further(comparison)):
        data, window = _data(comparison, quantity)
        if data:
            charts.append(_chart(comparison, quantity, data, window))
    return charts


def _further(comparison: Comparison) -> list[Quantity]:
    """Other metrics that were asked for: they are measured by their last value, and their mean."""
    drawn = {quantity.metric for quantity in QUANTITIES}
    keys = [measure.key for measure in comparison.measures if measure.key.endswith("/last")]
    metrics = [key.removesuffix("/last") for key in keys]
    return [Quantity(re.sub(r"\W+", "_", m), m, m) for m in metrics if m not in drawn]


def _data(comparison: Comparison, quantity: Quantity) -> tuple[Data, int]:
    """The histories that can be drawn, and the window of their moving mean."""
    data: Data = {}
    for arm in comparison.arms:
        found = {s: run.metrics.get(quantity.metric) for s, run in arm.runs.items()}
        data[arm.name] = {s: h for s, h in found.items() if h is not None and len(h.steps)}
    every = [history for own in data.values() for history in own.values()]
    if not any(_can_be_drawn(history, quantity) for history in every):
        return {}, 1
    window = 2 * (max(len(history.steps) for history in every) // 40) + 1
    if quantity.smooth:
        data = {
            arm: {seed: smoothed(history, window) for seed, history in own.items()}
            for arm, own in data.items()
        }
    return data, window


def _can_be_drawn(history: History, quantity: Quantity) -> bool:
    values = history.values[np.isfinite(history.values)]
    return bool((values > 0).any()) if quantity.log else bool(values.size)


def _chart(comparison: Comparison, quantity: Quantity, data: Data, window: int) -> Chart:
    axis = axis_for(quantity, data)
    caption = _caption(comparison, axis, data, window)
    arms = comparison.arms
    if len(arms) <= TOGETHER:
        panel = Panel(
            quantity.title,
            f"{quantity.title} over steps of {', '.join(plain(arm.name) for arm in arms)}.",
            partial(_draw_together, arms=arms, data=data, axis=axis),
        )
        margins = Margins(top=0.14 + 0.17 * len(arms))
        return Chart(quantity.key, quantity.title, caption, (panel,), 5.3, 2.9, margins)
    panels = tuple(
        Panel(
            plain(arm.name),
            f"{quantity.title} over steps of {plain(arm.name)}, {len(data[arm.name])} of "
            f"{max(len(arm.runs), len(data[arm.name]))} seeds, beside the baseline.",
            partial(_draw_alone, arm=arm, base=comparison.reference(arm), data=data, axis=axis),
        )
        for arm in arms
    )
    top = 0.25 if all(len(plain(arm.name)) <= TITLE for arm in arms) else 0.38
    margins = Margins(top=top)
    return Chart(quantity.key, quantity.title, caption, panels, 2.7, 1.55 + top, margins)


def _caption(comparison: Comparison, axis: Axis, data: Data, window: int) -> str:
    """How the chart is to be read."""
    quantity, several = axis.quantity, max(len(own) for own in data.values())
    said = []
    if len(comparison.arms) > TOGETHER:
        base = f"the baseline, {plain(comparison.baseline.name)}"
        base = "the full arm of the same factors" if comparison.references else base
        said.append(f"Coloured: the arm. Uncoloured: {base}.")
    if quantity.single:
        said.append("A line a run.")
        if several > 1 and len(comparison.arms) > TOGETHER:
            said.append("Behind each arm, grey: the range of the baseline's runs.")
        said.append(f"Circles: spikes, above {SPIKE:g} times the run's median of those above 0.")
    elif axis.band == "interval":
        said.append("Mean over seeds; band: its 95% interval (Student's t).")
    elif axis.band == "range":
        said.append("Mean over seeds; band: from the smallest to the largest seed.")
    if not quantity.single and 1 < several <= SEEDS_SHOWN:
        said.append("Thin: single seeds. A mean ends where a seed is lost.")
    if quantity.smooth and window > 1:
        said.append(f"Each run smoothed by a centred mean over {window} values.")
    said.append(_edges(axis, data))
    return " ".join(filter(None, said))


def _edges(axis: Axis, data: Data) -> str:
    """What the marks at the edges mean, those that there are."""
    every = [history.values for own in data.values() for history in own.values()]
    said = ["Log scale"] if axis.quantity.log else []
    if axis.zero is not None:
        said.append("zero lies on the lower edge")
    if any((values > axis.values[1]).any() for values in every):
        said.append("▲ infinite or beyond the axis")
    if any(np.isneginf(values).any() for values in every):
        said.append("▼ minus infinity")
    if any(np.isnan(values).any() for values in every):
        said.append("× not a number from here on")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}." if said else ""


def _draw_together(axes: "Axes", arms: Sequence[Arm], data: Data, axis: Axis) -> None:
    dress(axes, axis)
    for arm, pen in zip(arms, PENS, strict=False):
        draw(axes, data[arm.name], pen, axis, faint=True)
        marker = pen.marker if few(data[arm.name]) else ""
        label = shortened(arm.name, 70)
        axes.plot([], [], pen.line, color=pen.colour, marker=marker, ms=3.5, lw=1.4, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderaxespad=0.2, fontsize=NORMAL,
                handlelength=3, labelspacing=0.25)  # fmt: skip


def _draw_alone(axes: "Axes", arm: Arm, base: Arm, data: Data, axis: Axis) -> None:
    dress(axes, axis)
    own = data[arm.name]
    if arm is not base:
        draw_behind(axes, data[base.name], axis)
    draw(axes, own, BASELINE if arm is base else ALONE, axis)
    title = on_two_lines(arm.name, TITLE)
    axes.text(0, 1.04, title, transform=axes.transAxes, va="bottom", weight="bold", size=NORMAL)
    if not own:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=MUTED)
    elif len(own) < len(arm.runs):
        said = f"{len(own)} of {len(arm.runs)} seeds"
        axes.text(1, 1, said, transform=axes.transAxes, ha="right", va="top", color=MUTED)
