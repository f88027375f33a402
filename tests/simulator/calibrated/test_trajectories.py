"""The model of many runs at once is the reference model's own step functions, run by run."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_qrl.simulator.calibrated.trajectories import Ages, as_arrays, trajectories
from lightning_qrl.simulator.constants import POST
from lightning_qrl.simulator.dynamics import mismatch, next_drift, next_reward


def mixed_lags(steps, rng):
    """Of each step up to 4 ages, none older than the run."""
    made = []
    for step in range(steps):
        ages = sorted(set(rng.integers(0, min(step, 6) + 1, size=4).tolist()))
        share = rng.dirichlet(np.ones(len(ages))).tolist()
        made.append(tuple(zip(map(float, ages), share, strict=True)))
    return tuple(made)


def slow(lags, floor, learning, settling, erosion, erosion_power):
    """The same in plain Python, straight from the equations."""
    start, ceiling = learning.reward_start, learning.reward_ceiling
    rewards, rooms, drift, rows = [start], [1.0], 0.0, []
    for step, own in enumerate(lags):
        cost = sum(
            share * learning.staleness_scale * age**learning.staleness_power
            * rooms[step - round(age)]
            for age, share in own
        )  # fmt: skip
        now = floor * rooms[step]
        dynamic = cost + learning.floor_share * now
        drift = next_drift(drift, dynamic**2 / (dynamic + learning.half), learning)
        drift = min(drift, learning.drift_limit)
        sampled = sum(share * rewards[step - round(age)] for age, share in own)
        reward = rewards[step]
        got = (reward - start) / (ceiling - start)
        reward = next_reward(reward, cost + now, drift, learning)
        reward -= erosion * (cost + now) * got**erosion_power * (ceiling - start)
        rewards.append(reward)
        rooms.append(((ceiling - reward) / (ceiling - start)) ** settling)
        rows.append((cost + now + learning.drift_in_mismatch * drift, sampled, drift, reward))
    return np.array(rows)


@pytest.mark.parametrize("new", [(0, 0, 0), (0.8, 0, 0), (0, 0.3, 1.5), (0.8, 0.3, 1.5)])
def test_runs_of_unequal_length_side_by_side_are_each_run_alone(new):
    rng = np.random.default_rng(0)
    learning = replace(POST.learning, staleness_power=1.2)
    names = dict(zip(("settling", "erosion", "erosion_power"), new, strict=True))
    runs, floors = [mixed_lags(steps, rng) for steps in (25, 12, 18)], [0.01, 0.0, 0.04]
    made = trajectories(as_arrays(learning, names), np.array([floors]), Ages.of(runs))
    for r, (lags, floor) in enumerate(zip(runs, floors, strict=True)):
        expected = slow(lags, floor, learning, **names)
        parts = (made.mismatch, made.sampled, made.drift, made.reward[:, 1:])
        got = np.stack([part[0, : len(lags), r] for part in parts], axis=1)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_with_nothing_new_a_step_is_that_of_the_reference_model():
    ages, floor, learning = [0.0, 2.0, 3.0, 3.0], 0.02, POST.learning
    of = mismatch(ages, floor, learning)
    lags = [((0.0, 0.25), (2.0, 0.25), (3.0, 0.5))] * 30
    made = trajectories(as_arrays(learning, {}), np.array([[floor]]), Ages.of([lags]))
    drift, reward = 0.0, learning.reward_start
    for step in range(30):
        drift = next_drift(drift, of.effective, learning)
        reward = next_reward(reward, of.mean, drift, learning)
        assert made.drift[0, step, 0] == pytest.approx(drift, rel=1e-12)
        assert made.reward[0, step + 1, 0] == pytest.approx(reward, rel=1e-12)
    shown = of.mean + learning.drift_in_mismatch * drift
    assert made.mismatch[0, -1, 0] == pytest.approx(shown, rel=1e-12)


def test_sets_of_constants_do_not_mix():
    lags = [((1.0, 1.0),)] * 20
    one, other = (as_arrays(replace(POST.learning, gain=g), {"settling": 0.5}) for g in (2.0, 6.0))
    both = {name: np.concatenate([one[name], other[name]]) for name in one}
    made = trajectories(both, np.array([[0.01], [0.03]]), Ages.of([lags]))
    for at, (alone, floor) in enumerate(((one, 0.01), (other, 0.03))):
        single = trajectories(alone, np.array([[floor]]), Ages.of([lags]))
        for got, expected in zip(made, single, strict=True):
            np.testing.assert_allclose(got[at], expected[0], rtol=1e-14)
