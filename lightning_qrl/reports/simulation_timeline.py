"""The timeline of a run of the reference model, for a terminal: one column a stretch of time.

    time     0         10        20
    trainer  ····0━━━·1━━━·2!!!·        the version that a step trains, while it lasts
    weights  ········1····2····3        a new version, from when samplers can have it
    sampler  0━━━0━━1━━━··1xxxx2        the version that samples; x: the rollout will be discarded

A digit is the last one of a version. It stands where something begins, so of two that begin in one
column the later is seen.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.trace import Rollout, Step, Trace

LABEL, LEAST_COLUMNS = 12, 10
MOST_SAMPLERS = 16  # that are drawn
AXIS_STEPS = (1, 2, 5, 10, 20, 50, 100)
AXIS_GAP = 8  # columns between two times, at least
COLOURS = ("cyan", "green", "blue")  # of versions, in turn
BAD, FAINT = "red", "dim"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What is drawn with.

    Attributes:
        goes_on: after the digit with which something began.
        waits: nothing is done.
        bars: for heights, the lowest first.
        shades: for values, the lowest first.
    """

    goes_on: str
    waits: str
    bars: str
    shades: str


BLOCKS = Glyphs("━", "·", "▁▂▃▄▅▆▇█", "░▒▓█")
ASCII = Glyphs("-", ".", ".:-=+*#@", ".:*#")
LOST, AMISS = "x", "!"


def glyphs_for(encoding: str) -> Glyphs:
    """Blocks where an encoding has them, else ASCII."""
    try:
        "".join((BLOCKS.goes_on, BLOCKS.waits, BLOCKS.bars, BLOCKS.shades)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


class _Row:
    """Cells of one row: characters with their styles."""

    def __init__(self, columns: int, duration: float, blank: str = " ") -> None:
        self.cells = [(blank, FAINT)] * columns
        self._per_column = duration / columns

    def column(self, time: float) -> int:
        """The column in which a time falls; times are sums of ticks, so up to rounding."""
        return min(len(self.cells) - 1, int(time / self._per_column + 1e-6))

    def put(self, time: float, text: str, style: str = "") -> None:
        """Write one character a column, as far as there are columns."""
        first = self.column(time)
        for place, character in enumerate(text[: len(self.cells) - first], first):
            self.cells[place] = (character, style)

    def span(self, start: float, end: float, version: int, fill: str, style: str) -> None:
        """A version's digit where something begins, and ``fill`` as long as it goes on."""
        last = math.ceil(end / self._per_column - 1e-6) - 1
        self.put(start, f"{version % 10}" + fill * (last - self.column(start)), style)

    def text(self, label: str) -> Text:
        """The row, with what it is of before it."""
        alike = groupby(self.cells, key=lambda cell: cell[1])
        parts = (("".join(c for c, _ in cells), style) for style, cells in alike)
        return Text.assemble(f"{label:{LABEL}}", *parts)


def timeline(trace: Trace, width: int, glyphs: Glyphs, constants: Constants = POST) -> list[Text]:
    """Lines that show who did what when.

    Args:
        trace: of the run.
        width: of the terminal, in columns.
        glyphs: to draw with.
        constants: those of the run.
    """
    columns = max(LEAST_COLUMNS, width - LABEL)

    def row(blank: str = " ") -> _Row:
        return _Row(columns, trace.duration, blank)

    shown = min(trace.settings.samplers, MOST_SAMPLERS)
    samplers = [row(glyphs.waits) for _ in range(shown)]
    for rollout in trace.rollouts:
        if rollout.sampler < shown:
            _draw_rollout(samplers[rollout.sampler], rollout, glyphs)
    lines = [
        _axis(row(), trace.duration).text("time"),
        _trainer(row(glyphs.waits), trace, glyphs).text("trainer"),
        _weights(row(), trace, glyphs).text("weights"),
        *(line.text(f"sampler {number}") for number, line in enumerate(samplers)),
    ]
    if shown < trace.settings.samplers:
        lines.append(Text(f"{'':{LABEL}}and {trace.settings.samplers - shown} more", FAINT))
    if trace.discarded:
        lines.append(_discards(row(), trace.rollouts).text("discarded"))
    if trace.steps:
        drifts = [step.drift for step in trace.steps]
        most = max(constants.learning.divergence, *drifts)
        lines.append(_heights(row(), trace.steps, drifts, most, glyphs).text("drift"))
        rewards = [step.reward for step in trace.steps]
        lines.append(_heights(row(), trace.steps, rewards, 1.0, glyphs).text("reward"))
    return lines


def legend(trace: Trace, width: int, glyphs: Glyphs) -> list[Text]:
    """What the characters of a timeline mean, in lines that fit."""
    said = [
        f"digit: the version's last, where a rollout or a step begins; {glyphs.goes_on} goes on",
        f"{glyphs.waits} waits",
    ]
    if trace.discarded:
        said.append(f"{LOST} a rollout that will be discarded")
    if trace.diverged_at_step is not None:
        said.append(f"{AMISS} diverged")
    lines = textwrap.wrap("; ".join(said), max(width, LABEL + LEAST_COLUMNS))
    return [Text(line, FAINT) for line in lines]


def _axis(row: _Row, duration: float) -> _Row:
    per_column = duration / len(row.cells)
    step = next((s for s in AXIS_STEPS if s / per_column >= AXIS_GAP), math.ceil(duration))
    for time in range(0, math.ceil(duration), step):
        if row.column(time) + len(str(time)) <= len(row.cells):
            row.put(time, str(time), FAINT)
    return row


def _trainer(row: _Row, trace: Trace, glyphs: Glyphs) -> _Row:
    for number, step in enumerate(trace.steps):
        diverged = trace.diverged_at_step is not None and number >= trace.diverged_at_step
        fill, style = (AMISS, BAD) if diverged else (glyphs.goes_on, _colour(step.version))
        row.span(step.start, min(step.end, trace.duration), step.version, fill, style)
    return row


def _weights(row: _Row, trace: Trace, glyphs: Glyphs) -> _Row:
    """Broadcasts; without, each version when the step that made it ends."""
    for sent in trace.broadcasts:
        end = min(sent.end, trace.duration)
        row.span(sent.start, end, sent.version, glyphs.goes_on, _colour(sent.version))
    for step in () if trace.settings.weight_sync else trace.steps:
        if step.end < trace.duration:
            made = step.version + 1
            row.put(step.end, f"{made % 10}", _colour(made))
    return row


def _draw_rollout(row: _Row, rollout: Rollout, glyphs: Glyphs) -> None:
    lost = rollout.fate == "discarded"
    for start, version in rollout.versions:
        style = BAD if lost else _colour(version)
        row.span(start, rollout.end, version, LOST if lost else glyphs.goes_on, style)


def _discards(row: _Row, rollouts: Sequence[Rollout]) -> _Row:
    """How many in each column; + for more than nine."""
    times = (r.left for r in rollouts if r.fate == "discarded" and r.left is not None)
    for column, count in Counter(map(row.column, times)).items():
        row.cells[column] = (f"{count}" if count < 10 else "+", BAD)
    return row


def _heights(
    row: _Row, steps: Sequence[Step], values: Sequence[float], most: float, glyphs: Glyphs
) -> _Row:
    """A bar in each column: the newest step's value, of ``most``."""
    top = len(glyphs.bars) - 1
    for step, value in zip(steps, values, strict=True):
        bar = glyphs.bars[round(min(max(value / most, 0.0), 1.0) * top)]
        row.put(step.start, bar * len(row.cells))
    return row


def _colour(version: int) -> str:
    return COLOURS[version % len(COLOURS)]
