"""Intervals where runs share noise, and where the search has found no end."""

from dataclasses import replace

import numpy as np
import pytest
from calibrations import TRUTH, grid

from lightning_qrl.simulator.calibrated.calibrate import prepare
from lightning_qrl.simulator.calibrated.fit import fit
from lightning_qrl.simulator.calibrated.intervals import intervals
from lightning_qrl.simulator.calibrated.structure import Structure


def with_shared_noise(seeds, size, rng):
    """Runs whose rewards have, beside their own noise, some that the runs of a seed share."""
    made = []
    for seed in seeds:
        noise = size * rng.standard_normal(30)
        made += [
            replace(run, reward=tuple((np.array(run.reward) + noise).tolist()), held_out=())
            for run in grid(seeds=(seed,))
        ]
    return made


def test_noise_that_the_runs_of_a_seed_share_makes_intervals_wider():
    """For the same numbers, by how the seeds are called."""
    shared = with_shared_noise(range(3), 0.1, np.random.default_rng(3))
    apart = [replace(run, seed=at) for at, run in enumerate(shared)]
    found = fit(prepare(shared), Structure())
    (low, high), (near_low, near_high) = (
        intervals(prepare(runs), found)["reward_start"] for runs in (shared, apart)
    )
    assert high - low > 1.5 * (near_high - near_low)


@pytest.mark.slow
def test_with_shared_noise_intervals_hold_the_truth_about_as_often_as_they_say():
    """Two thirds of the variance of rewards shared, 4 seeds; what rewards tell, nominal 95%."""
    rng, hits = np.random.default_rng(5), []
    for first in range(0, 120, 4):
        runs = prepare(with_shared_noise(range(first, first + 4), 0.028, rng))
        found = intervals(runs, fit(runs, Structure()))
        for name in ("reward_start", "reward_ceiling", "reward_rate"):
            low, high = found[name]
            hits.append(low < getattr(TRUTH, name) < high)
    assert np.mean(hits) > 0.85


def test_an_end_at_the_edge_of_the_search_is_none():
    """Rewards that mismatch does not slow down have no mismatch at which progress stops."""
    runs = prepare(grid(learning=replace(TRUTH, mismatch_limit=1e4), noise=0.01))
    found = intervals(runs, fit(runs, Structure()))
    low, high = found["mismatch_limit"]
    assert high is None
    assert low is None or low > 1
    for name in ("staleness_scale", "reward_start", "reward_ceiling", "floor/bf16"):
        assert None not in found[name]


def test_rewards_below_0_have_intervals_around_them():
    """A floor of 0 is an end; a reward of 0 is none."""
    runs = [
        replace(
            run, reward=tuple(reward - 1 for reward in run.reward),
            held_out=tuple((step, reward - 1) for step, reward in run.held_out),
        )
        for run in grid()
    ]  # fmt: skip
    runs = prepare(runs)
    low, high = intervals(runs, fit(runs, Structure()))["reward_start"]
    assert low < TRUTH.reward_start - 1 < high < 0
