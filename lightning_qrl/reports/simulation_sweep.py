"""A sweep in the terminal: along one setting a table with bars, over two a heat map.

A cell of a heat map is a shade, from the lowest value to the highest, and the value; where they do
not fit, the shade alone. What diverged is marked, whatever its value.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from lightning_qrl.reports.simulation import NO_LIMIT, says_stability
from lightning_qrl.reports.simulation_timeline import AMISS, BAD, FAINT, Glyphs
from lightning_qrl.reports.tables import text_table
from lightning_qrl.simulator.summary import Summary
from lightning_qrl.simulator.sweep import Point
from lightning_qrl.simulator.words import plain

BAR, REWARD_BAR = 8, 5  # columns
GAP = 2  # between columns
SWEEP_LEGEND = {
    "stale": "stale: mean versions behind",
    "lost": "lost: rollouts discarded",
    "train": "train, sample: share of the time at work",
}
SHADE_STYLES = ("blue", "cyan", "green", "bold green")
NO_STEP = "-"
IMPOSSIBLE = "x"
WRITTEN_OUT = 2  # neighbouring values; more are written as from where to where


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of a heat map.

    Attributes:
        value: None where there is none.
        mark: stands for the shade where it is not empty.
        after: is said beside the value.
    """

    value: float | None
    mark: str = ""
    after: str = ""


def sweep_table(points: Sequence[Point], axis: str, width: int, glyphs: Glyphs) -> str:
    """A line for each value: the outcome, and a bar of the reward, as far as there is room."""
    summaries = [point.summary for point in points]
    columns = {
        axis: [plain(point.at[0]) for point in points],
        "reward": [f"{s.final_reward:.3f}" for s in summaries],
        "": [bar(s.final_reward, 1.0, glyphs, REWARD_BAR) for s in summaries],
        "steps": [str(s.optimizer_steps) for s in summaries],
        "drift": [f"{s.final_drift:.2f}" for s in summaries],
        "diverged": [_ended(s) for s in summaries],
        "stale": [f"{s.mean_staleness:.2f}" for s in summaries],
        "lost": [str(s.discarded) for s in summaries],
        "train": [f"{s.trainer_utilization:.0%}" for s in summaries],
        "sample": [f"{s.sampler_utilization:.0%}" for s in summaries],
    }
    ranked = (axis, "reward", "diverged", "drift", "stale", "steps", "train", "sample", "lost", "")
    return table_that_fits(columns, ranked, SWEEP_LEGEND, width)


def table_that_fits(
    columns: Mapping[str, Sequence[str]],
    ranked: Sequence[str],
    legend: Mapping[str, str],
    width: int,
) -> str:
    """A table of the most important columns, as many as fit, and what their headings mean.

    Args:
        columns: cells by heading, in their order.
        ranked: the headings, the most important first.
        legend: of some headings.
        width: of the terminal.
    """
    taken, room = {*ranked[:2]}, width + GAP
    for heading in ranked:
        room -= GAP + max(len(heading), *(len(cell) for cell in columns[heading]))
        if room < 0:
            break
        taken.add(heading)
    shown = [heading for heading in columns if heading in taken]
    rows = list(zip(*(columns[heading] for heading in shown), strict=True))
    said = "; ".join(text for heading, text in legend.items() if heading in taken)
    lines = textwrap.wrap(said, max(width, 24))
    return text_table(shown, rows) + "".join(f"{line}\n" for line in lines)


def _ended(summary: Summary) -> str:
    step = summary.diverged_at_step
    return "no step" if summary.why_no_step else "" if step is None else f"{AMISS} at {step}"


def bar(value: float, most: float, glyphs: Glyphs, size: int = BAR) -> str:
    """A bar of a value from 0 to ``most``, padded to its full size."""
    filled = round(size * min(max(value / most, 0.0), 1.0)) if most else 0
    return (glyphs.goes_on * filled).ljust(size)


def reward_map(
    points: Sequence[Point], axes: Sequence[str], width: int, glyphs: Glyphs
) -> list[Text]:
    """The heat map of the final reward over two settings, with its legend."""
    cells = {point.at: _reward_cell(point.summary) for point in points}
    lines = heat_map(cells, axes, width, "{:.2f}", glyphs)
    return [*lines, *scale_text(cells, "final reward", "{:.2f}", glyphs)]


def _reward_cell(summary: Summary) -> Cell:
    if summary.why_no_step is not None:
        return Cell(None)
    return Cell(summary.final_reward, "" if summary.stable else AMISS)


def heat_map(
    cells: dict[tuple[Any, ...], Cell],
    axes: Sequence[str],
    width: int,
    form: str,
    glyphs: Glyphs,
) -> list[Text]:
    """Rows of the first axis and columns of the second, in bands that fit the width.

    Args:
        cells: by their values on the two axes; all combinations.
        axes: names of the two.
        width: of the terminal.
        form: of a value.
        glyphs: to draw with.
    """
    downs, acrosses = (list(dict.fromkeys(at[i] for at in cells)) for i in (0, 1))
    label = max(len(axes[0]), *(len(plain(down)) for down in downs)) + 2
    shade = _shades(cells, glyphs)
    texts = {
        at: form.format(cell.value) + cell.after if cell.value is not None else ""
        for at, cell in cells.items()
    }
    cell_width = 3 + max(max(map(len, texts.values())), *(len(plain(a)) - 1 for a in acrosses))
    room, numbers = max(cell_width, width - label), True
    if cell_width * len(acrosses) > room:
        cell_width, numbers = 1, False
    per_band = room // cell_width
    lines = []
    for first in range(0, len(acrosses), per_band):
        band = acrosses[first : first + per_band]
        lines += _head(axes, band, label, cell_width, numbers=numbers)
        for down in downs:
            line = Text(f"{plain(down):{label}}")
            for across in band:
                character, style = shade(cells[down, across])
                text = f"{character}{texts[down, across]}" if numbers else character
                line.append(text.ljust(cell_width), style)
            lines.append(line)
    return lines


def _head(
    axes: Sequence[str], band: Sequence[Any], label: int, cell_width: int, *, numbers: bool
) -> list[Text]:
    if not numbers:
        ends = f"{axes[1]} {plain(band[0])} to {plain(band[-1])}"
        return [Text(f"{'':{label}}{ends}"), Text(f"{axes[0]:{label}}")]
    columns = "".join(f" {plain(value)}".ljust(cell_width) for value in band)
    return [Text(f"{'':{label}} {axes[1]}"), Text(f"{axes[0]:{label}}{columns}".rstrip())]


def _shades(
    cells: dict[tuple[Any, ...], Cell], glyphs: Glyphs
) -> Callable[[Cell], tuple[str, str]]:
    low, high = _ends(cells)
    top = len(glyphs.shades) - 1

    def shade(cell: Cell) -> tuple[str, str]:
        if cell.mark or cell.value is None:
            return cell.mark or NO_STEP, BAD if cell.mark == AMISS else FAINT
        level = round((cell.value - low) / (high - low) * top) if high > low else top
        return glyphs.shades[level], SHADE_STYLES[level]

    return shade


def _ends(cells: dict[tuple[Any, ...], Cell]) -> tuple[float, float]:
    values = [c.value for c in cells.values() if c.value is not None and not c.mark]
    return (min(values), max(values)) if values else (0.0, 0.0)


def scale_text(
    cells: dict[tuple[Any, ...], Cell], what: str, form: str, glyphs: Glyphs
) -> list[Text]:
    """The legend of a heat map: what its shades and marks mean."""
    low, high = _ends(cells)
    said = [
        f"{what}: {glyphs.shades[0]} {form.format(low)} to {glyphs.shades[-1]} {form.format(high)}"
    ]
    if any(cell.mark == AMISS for cell in cells.values()):
        said.append(f"{AMISS} diverged")
    if any(cell.value is None and not cell.mark for cell in cells.values()):
        said.append(f"{NO_STEP} no optimizer step")
    if any(cell.mark == IMPOSSIBLE for cell in cells.values()):
        said.append(f"{IMPOSSIBLE} impossible")
    return [Text("; ".join(said), FAINT)]


def stable_text(points: Sequence[Point], axes: Sequence[str]) -> str:
    """Which settings did not diverge: of two, for each value of the first, alike ones together."""
    if not all(says_stability(point.summary) for point in points):
        return f"stable      {NO_LIMIT}\n"
    if len(axes) == 1:
        return f"stable      {_stable(points, axes[0])}\n"
    downs = list(dict.fromkeys(point.at[0] for point in points))
    where: dict[str, list[bool]] = {}
    for place, down in enumerate(downs):
        line = [point for point in points if point.at[0] == down]
        where.setdefault(_stable(line, axes[1]), [False] * len(downs))[place] = True
    return "".join(
        f"stable      {axes[0]}={spans(downs, holds)}: {which}\n" for which, holds in where.items()
    )


def _stable(line: Sequence[Point], axis: str) -> str:
    holds = [point.summary.stable for point in line]
    if all(holds):
        return f"all of {axis}"
    return (
        f"{axis}={spans([point.at[-1] for point in line], holds)}" if any(holds) else f"no {axis}"
    )


def spans(values: Sequence[Any], holds: Sequence[bool]) -> str:
    """Those of the values that hold: whole numbers in sequence as ``a..b``, as they are given."""
    runs: list[list[Any]] = []
    before = False
    for value, one in zip(values, holds, strict=True):
        if one:
            runs = runs if before else [*runs, []]
            runs[-1].append(value)
        before = one
    return ",".join(map(_span, runs))


def _span(run: Sequence[Any]) -> str:
    first, last = plain(run[0]), plain(run[-1])
    if len(run) <= WRITTEN_OUT:
        return ",".join(map(plain, run))
    if all(type(value) is int for value in run) and list(run) == [*range(run[0], run[-1] + 1)]:
        return f"{first}..{last}"
    return f"{first} to {last}"
