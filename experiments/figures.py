"""The figures of docs/ledger.md, from the runs of `ledger.py`.

    python experiments/figures.py five-arms docs/figures/five_arms.png
    python experiments/figures.py staleness docs/figures/staleness.png

`five-arms`: the gradient norm, step by step, of each arm, all seeds; a spike is marked.
`staleness`: held-out reward by staleness, a panel a precision, a line a cure, with 95% intervals
over seeds.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from grids import CURES, EXPERIMENTS, LAGS, PRECISIONS, cell, slug
from ledger import SPIKE, interval, summary
from matplotlib.axes import Axes

from lightning_qrl.reports.figures import BLUE, CYCLE, GREY, MARKERS, VERMILION, drawn


def main() -> None:
    """Parse and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=list(FIGURES))
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("ledger"), help="folder of the runs")
    given = parser.parse_args()
    FIGURES[given.experiment](given.out / given.experiment, given.file)


def five_arms(runs: Path, file: Path) -> None:
    """Gradient norms: a panel an arm."""
    arms = EXPERIMENTS["five-arms"].arms
    title = "4bitter_moe, 8 versions behind: gradient norm, three seeds"
    with drawn(file, title, 7.0, [1.25] * len(arms)) as panels:
        for panel, arm in zip(panels, arms, strict=True):
            for path in sorted(runs.glob(f"{arm.slug}-seed*.json")):
                _norms(panel, json.loads(path.read_text())["grad_norm"])
            panel.set_title(arm.name)
            panel.set_yscale("log")
            panel.set_ylim(1, 200)
        panels[len(panels) // 2].set_ylabel("gradient norm, before it is clipped")
        panels[-1].set_xlabel(f"optimizer step (mark: above {SPIKE:g} times the run's median)")


def _norms(panel: Axes, norms: list[float]) -> None:
    values = np.array([norm or np.nan for norm in norms])  # 0: no group had a signal
    steps = np.arange(1, len(values) + 1)
    panel.plot(steps, values, color=BLUE, linewidth=0.8, alpha=0.7)
    high = values > SPIKE * np.median(norms)
    panel.plot(steps[high], values[high], "o", color=VERMILION, markersize=3)


def staleness(runs: Path, file: Path) -> None:
    """Held-out reward by staleness: a panel a precision, a line a cure."""
    title = "Held-out reward after 60 steps, by staleness"
    with drawn(file, title, 6.0, [1.7] * len(PRECISIONS)) as panels:
        for panel, recipe in zip(panels, PRECISIONS, strict=True):
            for number, cure in enumerate(CURES):
                points = [_rewards(runs, slug(cell(recipe, lag, cure))) for lag in LAGS]
                middles, halves = zip(*(interval(np.array(p)) for p in points), strict=True)
                at = np.arange(len(LAGS)) + 0.12 * (number - 1)
                panel.errorbar(
                    at, middles, halves, label=cure, color=CYCLE[number], marker=MARKERS[number],
                    markersize=4, linewidth=1, capsize=2,
                )  # fmt: skip
            panel.axhline(0.95, color=GREY, linewidth=0.6, linestyle=":")
            panel.set_title(recipe)
            panel.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
            panel.set_ylim(0.5, 1.0)
        panels[0].legend(ncols=3, loc="lower left")
        panels[-1].set_xlabel("staleness, versions (mean and 95% interval over seeds)")


def _rewards(runs: Path, arm: str) -> list[float]:
    found = [summary(json.loads(path.read_text())) for path in runs.glob(f"{arm}-seed*.json")]
    return [row["held-out reward"] for row in found if "held-out reward" in row]


FIGURES: dict[str, Callable[[Path, Path], None]] = {"five-arms": five_arms, "staleness": staleness}

if __name__ == "__main__":
    main()
