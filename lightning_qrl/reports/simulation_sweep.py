"""A sweep in the terminal: along one setting a table with bars, over two a heat map.

A cell of a heat map is a shade, from the lowest value to the highest, and the value; where they do
not fit, the shade alone. What diverged is marked, whatever its value.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from lightning_qrl.reports.simulation import NO_LIMIT, plain, says_stability
from lightning_qrl.reports.simulation_timeline import AMISS, BAD, FAINT, Glyphs
from lightning_qrl.reports.tables import text_table
from lightning_qrl.simulator.summary import Summary
from lightning_qrl.simulator.sweep import Point

BAR = 8
SWEEP_LEGEND = "stale: mean versions behind; lost: rollouts discarded; busy: trainer, samplers\n"
SHADE_STYLES = ("blue", "cyan", "green", "bold green")
NO_STEP = "-"
MANY = 6  # values that are written out


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of a heat map.

    Attributes:
        value: None where there is none.
        mark: stands for the shade where it is not empty.
    """

    value: float | None
    mark: str = ""


def sweep_table(points: Sequence[Point], axis: str, glyphs: Glyphs) -> str:
    """A line for each value: the outcome, and a bar of the reward."""
    rows = [[plain(point.at[0]), *_cells(point.summary, glyphs)] for point in points]
    headings = [axis, "reward", "", "steps", "drift", "diverged", "stale", "lost", "busy"]
    return text_table(headings, rows) + SWEEP_LEGEND


def _cells(summary: Summary, glyphs: Glyphs) -> list[str]:
    step = summary.diverged_at_step
    return [
        f"{summary.final_reward:.3f}",
        bar(summary.final_reward, 1.0, glyphs),
        str(summary.optimizer_steps),
        f"{summary.final_drift:.2f}",
        "no step" if summary.why_no_step else "" if step is None else f"{AMISS} at {step}",
        f"{summary.mean_staleness:.2f}",
        str(summary.discarded),
        f"{summary.trainer_busy:4.0%} {summary.samplers_busy:4.0%}",
    ]


def bar(value: float, most: float, glyphs: Glyphs) -> str:
    """A bar of a value from 0 to ``most``, padded to its full width."""
    filled = round(BAR * min(max(value / most, 0.0), 1.0)) if most else 0
    return (glyphs.goes_on * filled).ljust(BAR)


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
        at: form.format(cell.value) if cell.value is not None else "" for at, cell in cells.items()
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
    if any(cell.value is None for cell in cells.values()):
        said.append(f"{NO_STEP} no optimizer step")
    return [Text("; ".join(said), FAINT)]


def stable_text(points: Sequence[Point], axes: Sequence[str]) -> str:
    """Which settings did not diverge: of two, for each value of the first, alike ones together."""
    lines = [f"stable      {NO_LIMIT}\n"]
    if all(says_stability(point.summary) for point in points):
        lines = _stable_lines(points, axes)
    able = [point for point in points if point.summary.stable]
    if able:
        best = max(able, key=lambda point: point.summary.final_reward)
        at = " ".join(f"{key}={plain(value)}" for key, value in zip(axes, best.at, strict=True))
        lines.append(f"best        {at}: reward {best.summary.final_reward:.3f}\n")
    return "".join(lines)


def _stable_lines(points: Sequence[Point], axes: Sequence[str]) -> list[str]:
    where: dict[str, list[str]] = {}
    for row in dict.fromkeys(point.at[:-1] for point in points):
        line = [point for point in points if point.at[:-1] == row]
        where.setdefault(_stable(line, axes[-1]), []).extend(map(plain, row))
    return [
        f"stable      {f'{axes[0]}={_shortened(rows)}: ' if rows else ''}{which}\n"
        for which, rows in where.items()
    ]


def _shortened(values: Sequence[str]) -> str:
    return ",".join(values if len(values) <= MANY else [*values[: MANY - 1], "..", values[-1]])


def _stable(line: Sequence[Point], axis: str) -> str:
    if all(point.summary.stable for point in line):
        return f"all of {axis}"
    runs = list(_runs([(point.at[-1], point.summary.stable) for point in line]))
    return f"{axis} {', '.join(runs)}" if runs else f"no {axis}"


def _runs(values: Sequence[tuple[Any, bool]]) -> Iterator[str]:
    """Neighbours that hold, as ``first to last``."""
    run: list[str] = []
    for value, holds in [*values, ("", False)]:
        if holds:
            run.append(plain(value))
        elif run:
            yield run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"
            run = []
