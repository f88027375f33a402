"""The simulator against our own asynchronous trainer: the runs, the calibration, and how far off.

    python experiments/simulator.py run --jobs 2       # resumable; one MLflow run each
    python experiments/simulator.py show               # the tables of docs/simulator.md

`calibration`: precision plans x constant lags x seeds, from which `simulator.calibrated` finds its
constants. `validation`: settings of asynchrony of other kinds, predicted by `simulator.cluster`
from the settings and the calibration alone, with seeds of its own. Loss `reinforce`, so that
nothing corrects for what is measured.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from grids import Arm
from ledger import QUIET, _one_thread
from simulator_grid import COMMON, SEEDS, STEPS, arms
from simulator_tables import show


@dataclass(frozen=True)
class Job:
    """One run."""

    experiment: str
    arm: Arm
    seed: int
    out: Path

    @property
    def name(self) -> str:
        """Of the run."""
        return f"{self.arm.name}-seed{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """What is asked of the arm's recipe."""
        return [
            *COMMON, *self.arm.overrides, f"trainer.max_steps={STEPS[self.experiment]}",
            f"seed={self.seed}", f"tracking.experiment={self.experiment}",
            f"tracking.uri={uri(self.out)}", f"tracking.run_name={self.name}",
        ]  # fmt: skip


def uri(out: Path) -> str:
    """Of the runs' store."""
    return f"sqlite:///{out / 'mlflow.db'}"


def jobs(experiment: str, out: Path) -> Iterator[Job]:
    """All runs of one of the two."""
    for seed in range(SEEDS[experiment]):
        for arm in arms(experiment):
            yield Job(experiment, arm, seed, out)


def main() -> None:
    """Parse, then run or show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "show"])
    parser.add_argument("--out", type=Path, default=Path("simulator"), help="folder of runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a thread each")
    parser.add_argument("--save", type=Path, help="file for the calibration, as JSON")
    given = parser.parse_args()
    out = given.out.resolve()
    if given.action == "run":
        run_all([job for experiment in STEPS for job in jobs(experiment, out)], given.jobs)
        return
    print("\n".join(show(uri(out), given.save)))


def run_all(wanted: list[Job], at_once: int) -> None:
    """Every job that has not a finished run yet; each worker does one after the other."""
    there = finished(wanted[0].out)
    missing = [job for job in wanted if (job.experiment, job.name) not in there]
    spawn = multiprocessing.get_context("spawn")  # a forked torch would share its threads
    with ProcessPoolExecutor(at_once, mp_context=spawn, initializer=_one_thread) as pool:
        for number, done in enumerate(pool.map(_timed, missing), start=1):
            print(f"{number}/{len(missing)} {done}", flush=True)


def finished(out: Path) -> set[tuple[str, str]]:
    """Experiments and names of the runs that are there."""
    from lightning_qrl.errors import UserError
    from lightning_qrl.tracking.notebook import select_runs

    if not (out / "mlflow.db").exists():
        return set()
    there = set()
    for experiment in STEPS:
        try:
            runs = select_runs(uri(out), [experiment]).read([])
        except UserError:  # none of it has begun
            continue
        there |= {(experiment, run.name) for run in runs if run.status == "FINISHED"}
    return there


def _timed(job: Job) -> str:
    from lightning_qrl.launch import launch
    from lightning_qrl.recipe import load_recipe

    began = time.perf_counter()
    job.out.mkdir(parents=True, exist_ok=True)
    os.chdir(job.out)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        outcome = launch(load_recipe(job.arm.recipe, job.overrides, QUIET))
    if outcome.status != "FINISHED":
        raise SystemExit(f"{job.name} was broken off; run it again")
    return f"{job.name}: {time.perf_counter() - began:.0f} s"


if __name__ == "__main__":
    main()
