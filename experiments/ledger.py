"""The runs behind docs/ledger.md: what asynchrony does in low precision, and what each cure does.

    python experiments/ledger.py run staleness --jobs 2      # resumable
    python experiments/ledger.py show staleness              # the table, as in docs/ledger.md

An experiment is a grid of arms (a recipe and its overrides) times seeds. Each run is an ordinary
`qrl fit`: MLflow has it, in the folder given by `--out`, and beside it one small JSON file says
what the table needs; a run whose file is there is not run again. `show` gives means over seeds with
95% intervals (Student's t), and each arm's difference to its control, paired by seed.

A run whose policy comes apart (its logits are no longer finite) is counted as such and left out of
the means of all but the gradient norm.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from grids import EXPERIMENTS, Arm, Experiment
from numpy.typing import NDArray
from scipy import stats

SPIKE = 3.0  # a spike is a gradient norm above so many times the run's median
LAST = 10  # steps that "at the end" means
QUIET = ["live_view", "sampled_completions", "checkpoint"]  # not needed, and not free
SERIES = {
    "grad_norm": "train/grad_norm",
    "reward": "train/reward",
    "gap": "train/sampling/sampling_logp_difference/mean",
    "k3": "rollout_corr/k3_kl",
    "ess": "rollout_corr/ess_seq",
    "extreme": "rollout_corr/extreme_fraction",
    "entropy": "train/entropy",
    "sampled": "rollout_corr/rollout_log_ppl",  # E[-log q] of what was sampled: q's entropy
}


@dataclass(frozen=True)
class Job:
    """One run of an arm."""

    experiment: str
    arm: Arm
    seed: int
    out: Path

    @property
    def result(self) -> Path:
        """Where its numbers are."""
        return self.out / self.experiment / f"{self.arm.slug}-seed{self.seed}.json"

    @property
    def overrides(self) -> list[str]:
        """What is asked of the arm's recipe."""
        common = EXPERIMENTS[self.experiment].common
        return [*common, *self.arm.overrides, f"seed={self.seed}"]


def main() -> None:
    """Parse, then run or show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "show"])
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=Path("ledger"), help="folder of runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a thread each")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    grid = EXPERIMENTS[given.experiment]
    jobs = [
        Job(given.experiment, arm, seed, given.out.resolve())
        for seed in range(given.seeds)
        for arm in grid.arms
    ]
    if given.action == "run":
        run_all(jobs, given.jobs)
    else:
        print("\n".join(show(grid, jobs)))


def run_all(jobs: list[Job], at_once: int) -> None:
    """Every job whose result is not there yet; each worker does one after the other."""
    missing = [job for job in jobs if not job.result.exists()]
    spawn = multiprocessing.get_context("spawn")  # a forked torch would share its threads
    with ProcessPoolExecutor(at_once, mp_context=spawn, initializer=_one_thread) as pool:
        for number, job in enumerate(pool.map(_timed, missing), start=1):
            print(f"{number}/{len(missing)} {job}", flush=True)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _timed(job: Job) -> str:
    began = time.perf_counter()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        run_one(job)
    return f"{job.arm.slug} seed {job.seed}: {time.perf_counter() - began:.0f} s"


def run_one(job: Job) -> None:
    """Train, and write what the tables need."""
    from lightning_qrl.errors import UserError
    from lightning_qrl.launch import launch
    from lightning_qrl.recipe import load_recipe

    job.result.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(job.result.parent)
    uri = f"sqlite:///{job.result.parent / 'mlflow.db'}"
    name = f"{job.arm.slug}-seed{job.seed}"
    overrides = [
        *job.overrides,
        f"tracking.uri={uri}",
        f"tracking.run_name={name}",
        f"tracking.experiment=ledger-{job.experiment}",
    ]
    recipe = load_recipe(job.arm.recipe, overrides, [*QUIET, *job.arm.without])
    diverged, evaluations = "", {}
    try:
        outcome = launch(recipe)
        if outcome.status != "FINISHED":
            raise SystemExit(f"{name} was broken off; run it again")
        evaluations = outcome.evaluations
    except UserError as error:
        if "not finite" not in str(error):
            raise
        diverged = str(error)
    found = {"overrides": job.overrides, "diverged": diverged, "evaluations": evaluations}
    found |= dict(_series(uri, name))
    job.result.write_text(json.dumps(found))


def _series(uri: str, run: str) -> Iterator[tuple[str, list[float]]]:
    from lightning_qrl.tracking import read_series

    for short, metric in SERIES.items():
        yield short, list(read_series(uri, run, metric)[1])


MEANS = {  # columns that are means over steps, and of which series
    "reward, all steps": "reward",
    "mean |Δlogprob|": "gap",
    "k3 KL": "k3",
    "effective sample size": "ess",
    "extreme tokens": "extreme",
    "entropy, all steps": "entropy",
    "sampler's entropy": "sampled",
}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The numbers of one run, by column."""
    norms = np.array(found["grad_norm"])
    rows = {
        "largest grad norm": float(norms.max()),
        "spikes": float((norms > SPIKE * np.median(norms)).sum()),
        "diverged": float(bool(found["diverged"])),
    }
    if found["diverged"]:
        return rows
    last = max(found["evaluations"], key=int)
    rows["held-out reward"] = found["evaluations"][last]["reward"]
    rows["entropy, last steps"] = float(np.mean(found["entropy"][-LAST:]))
    return rows | {name: float(np.mean(found[series])) for name, series in MEANS.items()}


def show(grid: Experiment, jobs: list[Job]) -> Iterator[str]:
    """Markdown: a row an arm, then a row a contrast."""
    runs = {arm.slug: _of(arm, jobs) for arm in grid.arms}
    yield "| arm | seeds | " + " | ".join(grid.columns) + " |"
    yield "|---" * (len(grid.columns) + 2) + "|"
    for arm in grid.arms:
        own = runs[arm.slug]
        cells = [_cell([run.get(column) for run in own.values()]) for column in grid.columns]
        yield f"| {arm.name} | {len(own)} | " + " | ".join(cells) + " |"
    yield ""
    measured = [*grid.differences, *(f"{name}, ratio" for name in grid.ratios)]
    yield "| contrast | pairs | " + " | ".join(measured) + " |"
    yield "|---" * (len(measured) + 2) + "|"
    for name, pairs in grid.contrasts.items():
        both = [
            (runs[this][seed], runs[other][seed])
            for this, other in pairs
            for seed in sorted(runs[this].keys() & runs[other].keys())
        ]
        cells = [_cell(_apart(both, column)) for column in grid.differences]
        cells += [_ratio(both, column) for column in grid.ratios]
        yield f"| {name} | {len(both)} | " + " | ".join(cells) + " |"


def _of(arm: Arm, jobs: list[Job]) -> dict[int, dict[str, float]]:
    own = [job for job in jobs if job.arm == arm and job.result.exists()]
    found = {job: json.loads(job.result.read_text()) for job in own}
    for job, run in found.items():
        if run["overrides"] != job.overrides:
            raise SystemExit(f"{job.result} is of another arm; move it away and run it again")
    return {job.seed: summary(run) for job, run in found.items()}


Both = list[tuple[dict[str, float], dict[str, float]]]  # runs and their controls


def _apart(both: Both, column: str) -> list[float | None]:
    return [one[column] - other[column] for one, other in both if column in one and column in other]


def _ratio(both: Both, column: str) -> str:
    """Geometric mean of the ratios, with its 95% interval."""
    logs = [
        float(np.log(one[column] / other[column]))
        for one, other in both
        if one.get(column) and other.get(column)
    ]
    if len(logs) < 2:
        return "–"
    middle, half = interval(np.array(logs))
    low, value, high = np.exp([middle - half, middle, middle + half])
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval by Student's t."""
    deviation = values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(stats.t.ppf(0.975, len(values) - 1) * deviation)


def _cell(values: list[float | None]) -> str:
    """Mean and 95% interval of some seeds' values."""
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return "–"
    if len(known) == 1:
        return f"{known[0]:.3g}"
    middle, half = interval(known)
    return f"{middle:.3g} ± {half:.2g}"


if __name__ == "__main__":
    main()
