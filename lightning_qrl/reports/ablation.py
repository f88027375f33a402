"""An ablation as it goes: a grid of arms and seeds in a terminal, else a line as each run ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightning_qrl.reports.live import duration
from lightning_qrl.reports.tables import text_table

Key = tuple[str, int]  # arm and seed


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm with one seed.

    Attributes:
        state: how far it is.
        reward: its last held-out reward, if it is done and has one.
        error: what it failed with.
        part: of its steps that are done, from 0 to 1.
    """

    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    reward: float | None = None
    error: str = ""
    part: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state in ("done", "failed")

    def text(self) -> str:
        """A few characters."""
        if self.state == "running":
            return f"{self.part:.0%}"
        if self.state == "waiting":
            return "."
        return f"{self.reward:.3f}" if self.reward is not None else self.state


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an ablation stands.

    Attributes:
        title: what is ablated.
        arms: names, in the order of the table.
        seeds: in the order of the table.
        cells: of every arm and seed.
        seconds_left: estimated; None before there is a measurement.
    """

    title: str
    arms: Sequence[str]
    seeds: Sequence[int]
    cells: dict[Key, Cell]
    seconds_left: float | None = None

    @property
    def counted(self) -> str:
        """How many have ended, of how many."""
        ended = sum(cell.ended for cell in self.cells.values())
        return f"{ended}/{len(self.cells)} done"

    @property
    def expected(self) -> str:
        """The same, and how long the others take."""
        left = f", {duration(self.seconds_left)} left"
        over = all(cell.ended for cell in self.cells.values())
        return self.counted if over else f"{self.counted}{left}"

    def rows(self) -> list[list[str]]:
        """The table: an arm, its seeds, and the mean of what they reached."""
        return [[arm, *(self._cell(arm, s).text() for s in self.seeds), self._mean(arm)]
                for arm in self.arms]  # fmt: skip

    def headings(self) -> list[str]:
        """Over the columns of the table."""
        return ["arm", *(f"seed {seed}" for seed in self.seeds), "mean"]

    def failures(self) -> list[str]:
        """A line on each that failed."""
        return [
            f"failed  {arm} seed {seed}: {cell.error}"
            for (arm, seed), cell in self.cells.items()
            if cell.state == "failed"
        ]

    def _cell(self, arm: str, seed: int) -> Cell:
        return self.cells[arm, seed]

    def _mean(self, arm: str) -> str:
        cells = [self._cell(arm, seed) for seed in self.seeds]
        rewards = [cell.reward for cell in cells if cell.reward is not None]
        return f"{fmean(rewards):.3f}" if rewards else ""


class Screen:
    """Shows where an ablation stands, from `__enter__` to `__exit__`."""

    def __init__(self) -> None:
        console = Console()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, standing: Standing) -> None:
        """Draw the grid, in a terminal."""
        if self._live is not None:
            self._live.update(grid(standing))

    def tell(self, standing: Standing, key: Key) -> None:
        """Say that one has ended, where there is no grid."""
        if self._live is None:
            print(line(standing, key), flush=True)


def line(standing: Standing, key: Key) -> str:
    """One line of text on one that has ended."""
    cell = standing.cells[key]
    measured = "" if cell.reward is None else f": held-out {cell.reward:.3f}"
    said = f"failed: {cell.error}" if cell.state == "failed" else f"done{measured}"
    return f"{standing.expected}  {key[0]} seed {key[1]} {said}"


def grid(standing: Standing) -> RenderableType:
    """The table of arms and seeds for a terminal."""
    table = Table(title=Text(standing.title), title_justify="left", box=None, pad_edge=False)
    first, *seeds, last = standing.headings()
    table.add_column(first)
    for seed in seeds:
        table.add_column(seed, justify="right")
    table.add_column(last, justify="right", style="bold")
    for row in standing.rows():
        table.add_row(*(Text(text, "red" if text == "failed" else "") for text in row))
    failures = [Text(text, "red") for text in standing.failures()]
    return Group(table, Text(standing.expected, "bold"), *failures)


def result(standing: Standing, parent: str) -> str:
    """The last words: the table, what failed, and how to go on."""
    table = text_table(standing.headings(), standing.rows())
    lines = [f"held-out reward, {standing.counted}", table, *standing.failures()]
    return "\n".join([*lines, f"compare  qrl compare {parent}"])
