"""The grids behind docs/ledger.md: every arm is a recipe that can run, and the tables add up."""

import importlib
import math
import sys
from pathlib import Path

import pytest

from lightning_qrl.build import build
from lightning_qrl.launch import rehearse
from lightning_qrl.recipe import load_recipe

FOLDER = Path(__file__).resolve().parent.parent / "experiments"


@pytest.fixture
def ledger(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("ledger")


def test_every_arm_is_a_recipe_with_a_name_of_its_own(ledger):
    for experiment in ledger.EXPERIMENTS.values():
        slugs = [arm.slug for arm in experiment.arms]
        assert len(set(slugs)) == len(slugs)
        compared = {
            one for pairs in experiment.contrasts.values() for pair in pairs for one in pair
        }
        assert compared
        assert compared <= set(slugs)
        for arm in experiment.arms:
            recipe = load_recipe(arm.recipe, [*experiment.common, *arm.overrides], arm.without)
            assert recipe.values["trainer"]["max_steps"] in (30, 60)


@pytest.mark.slow
def test_every_arm_can_be_built(ledger):
    for experiment in ledger.EXPERIMENTS.values():
        for arm in experiment.arms:
            overrides = [*experiment.common, *arm.overrides]
            rehearse(build(load_recipe(arm.recipe, overrides, [*ledger.QUIET, *arm.without])))


def test_a_cell_is_the_mean_with_its_t_interval(ledger):
    half = 4.302652729696142 / math.sqrt(3)  # t(0.975, 2), deviation 1
    assert ledger._cell([1.0, 2.0, 3.0]) == f"2 ± {half:.2g}"
    assert ledger._cell([0.5, None]) == "0.5"
    assert ledger._cell([None]) == "–"


def test_a_ratio_is_the_geometric_mean(ledger):
    both = [({"x": 2.0}, {"x": 1.0}), ({"x": 8.0}, {"x": 1.0})]  # logs 1 and 3 in base 2
    half = 12.706204736432095 / math.sqrt(2) * math.sqrt(2)  # t(0.975, 1), deviation sqrt(2)
    assert ledger._ratio(both, "x") == f"4.00 [{2 ** (2 - half):.2f}, {2 ** (2 + half):.2f}]"
    assert ledger._ratio(both[:1], "x") == "–"


def test_a_run_is_summed_up(ledger):
    found = {name: [1.0, 1.0, 1.0, 7.0] for name in ledger.SERIES}
    found |= {"diverged": "", "evaluations": {"60": {"reward": 0.9}, "0": {"reward": 0.3}}}
    row = ledger.summary(found)
    assert (row["largest grad norm"], row["spikes"], row["held-out reward"]) == (7.0, 1.0, 0.9)
    assert row["mean |Δlogprob|"] == 2.5
    gone = ledger.summary(found | {"diverged": "the policy's logits are not finite"})
    assert gone == {"largest grad norm": 7.0, "spikes": 1.0, "diverged": 1.0}
