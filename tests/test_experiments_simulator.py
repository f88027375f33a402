"""The runs behind the simulator's calibration: each is a recipe that can run, and tables add up."""

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

from lightning_qrl.asynchrony.schedule import Schedule, check_reach
from lightning_qrl.asynchrony.settings import Asynchrony
from lightning_qrl.recipe import load_recipe

FOLDER = Path(__file__).resolve().parent.parent / "experiments"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("simulator"), importlib.import_module("simulator_tables")


def test_every_run_has_a_name_of_its_own_and_a_recipe(modules, tmp_path):
    simulator, _ = modules
    jobs = [job for experiment in simulator.STEPS for job in simulator.jobs(experiment, tmp_path)]
    assert len({(job.experiment, job.name) for job in jobs}) == len(jobs) == 4 * 6 * 2 + 8 * 2
    for job in (job for job in jobs if job.seed == 0):
        values = load_recipe(job.arm.recipe, job.overrides, simulator.QUIET).values
        assert values["trainer"]["max_steps"] == simulator.STEPS[job.experiment]
        assert values["grpo"]["prompts_per_rollout"] == 8


def test_every_setting_of_asynchrony_is_one_that_the_trainer_takes(modules):
    _, tables = modules
    assert len(tables.VALIDATION) >= 6
    for knobs in tables.VALIDATION.values():
        check_reach(Asynchrony(**knobs), groups=8, updates=1)


@pytest.mark.parametrize("name", ["constant", "rare_sync", "strict", "deep_queue"])
def test_a_prediction_is_that_of_the_trainers_own_schedule(modules, name):
    """The schedule that the trainer runs on, over other seeds: an oracle without a trainer."""
    _, tables = modules
    knobs = tables.VALIDATION[name]
    made = tables.pooled([tables.predicted_flow(o, name) for o in tables.predictions(knobs)])
    asynchrony, lags, discarded = Asynchrony(**knobs), Counter(), 0
    for seed in range(10):
        schedule = Schedule(
            asynchrony, groups=8, samplers=asynchrony.samplers or 8, updates=1, tokens=8, seed=seed
        )
        phases = [schedule.next_phase() for _ in range(120)]
        lags.update(p.number - g.spans[0].version for p in phases for g in p.groups)
        discarded += sum(phase.discarded for phase in phases)
    shares = {lag: count / lags.total() for lag, count in lags.items()}
    seen = tables.Flow(shares, 0.0, discarded / (discarded + lags.total()), 0.0)
    assert tables.distance(made, seen) < 0.02
    assert made.discarded == pytest.approx(seen.discarded, abs=0.01)


def test_a_cell_is_the_mean_with_its_deviation(modules):
    _, tables = modules
    assert tables.spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert tables.spread([0.5], "%") == "0.5%"
    assert tables.distance(
        tables.Flow({0: 1.0}, 0, 0, 0), tables.Flow({0: 0.25, 1: 0.75}, 0.75, 0, 0)
    ) == pytest.approx(0.75)
