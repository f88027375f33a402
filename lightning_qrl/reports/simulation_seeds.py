"""Many seeds in the terminal: means, and which share of the runs diverged.

Of two settings a heat map of the mean reward; what diverged with most of its seeds is marked.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from lightning_qrl.reports.simulation import labelled
from lightning_qrl.reports.simulation_sweep import (
    REWARD_BAR,
    Cell,
    bar,
    heat_map,
    scale_text,
    table_that_fits,
)
from lightning_qrl.reports.simulation_timeline import AMISS, FAINT, Glyphs
from lightning_qrl.simulator.seeds import Seeds
from lightning_qrl.simulator.words import plain

Found = Mapping[tuple[Any, ...], Seeds]
LEGEND = {
    "reward": "means over seeds",
    "sd": "sd: standard deviation of the reward",
    "stale": "stale: mean versions behind",
    "lost": "lost: rollouts discarded",
}
MOST = 0.5  # of the seeds


def seeds_text(seeds: Seeds, width: int, *, stability: bool) -> str:
    """What came of one setting.

    Args:
        seeds: of the runs.
        width: of the terminal.
        stability: whether the constants have a limit of stability.
    """
    lines = {
        "seeds": f"{seeds.seeds}, from {seeds.first_seed} up; means over them",
        "reward": (
            f"{seeds.final_reward:.3f}, standard deviation {seeds.reward_deviation:.3f}, from "
            f"{seeds.least_reward:.3f} to {seeds.largest_reward:.3f}"
        ),
        "diverged": f"{seeds.diverged:.0%} of the runs",
        "drift": f"{seeds.final_drift:.2f}",
        "steps": f"{seeds.optimizer_steps:.1f}",
        "staleness": f"{seeds.mean_staleness:.2f} versions",
        "discarded": f"{seeds.discarded:.1f} rollouts",
    }
    if not stability:
        del lines["diverged"]
    if seeds.without_step:
        lines["no step"] = f"{seeds.without_step:.0%} of the runs"
    return labelled(lines, width)


def seeds_table(found: Found, axis: str, width: int, glyphs: Glyphs) -> str:
    """A line for each value of one setting, as far as there is room."""
    all_of = list(found.values())
    columns = {
        axis: [plain(at[0]) for at in found],
        "reward": [f"{s.final_reward:.3f}" for s in all_of],
        "sd": [f"{s.reward_deviation:.3f}" for s in all_of],
        "": [bar(s.final_reward, 1.0, glyphs, REWARD_BAR) for s in all_of],
        "diverged": [f"{s.diverged:.0%}" for s in all_of],
        "drift": [f"{s.final_drift:.2f}" for s in all_of],
        "steps": [f"{s.optimizer_steps:.1f}" for s in all_of],
        "stale": [f"{s.mean_staleness:.2f}" for s in all_of],
        "lost": [f"{s.discarded:.1f}" for s in all_of],
    }
    ranked = (axis, "reward", "diverged", "sd", "drift", "stale", "steps", "lost", "")
    return table_that_fits(columns, ranked, LEGEND, width)


def seeds_map(found: Found, axes: Sequence[str], width: int, glyphs: Glyphs) -> list[Text]:
    """The heat map of the mean reward over two settings, with its legend."""
    cells = {at: _cell(seeds) for at, seeds in found.items()}
    lines = heat_map(cells, axes, width, "{:.2f}", glyphs)
    legend = Text(f"%: share that diverged; {AMISS} more than half of them", FAINT)
    return [*lines, *scale_text(cells, "mean reward", "{:.2f}", glyphs), legend]


def _cell(seeds: Seeds) -> Cell:
    if seeds.without_step == 1:
        return Cell(None)
    mark = AMISS if seeds.diverged > MOST else ""
    return Cell(seeds.final_reward, mark, f"{seeds.diverged:5.0%}")
