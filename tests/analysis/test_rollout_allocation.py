"""The best number of rollouts a prompt, on curves whose best n is known at every budget."""

import math

import numpy as np
import pytest
from scipy.optimize import curve_fit

from lightning_qrl.analysis.rollout_allocation import RolloutAllocation, allocate_rollouts
from lightning_qrl.analysis.sensitivity import Estimate
from lightning_qrl.analysis.series import Series
from lightning_qrl.errors import UserError

LOW, HIGH, C_MID, B = 8.0, 64.0, 10_000.0, 2.0
ROLLOUTS = [2**k for k in range(1, 9)]  # 2 to 256: beyond both levels
COMPUTE = np.geomspace(200, 500_000, 120)


def best(compute):
    """n*(C): the sigmoid in log-log."""
    rise = 1 / (1 + (C_MID / np.asarray(compute, float)) ** B)
    return np.exp(math.log(LOW) + math.log(HIGH / LOW) * rise)


def reward(n: int, compute):
    """Rises with compute for every n, and at each compute falls with the distance to n*."""
    return 0.2 * np.log(compute) - 0.01 * (math.log(n) - np.log(best(compute))) ** 2


def runs(seeds: int, std: float, rollouts=ROLLOUTS, seed: int = 0) -> dict[int, list[Series]]:
    """Seeds differ by an offset of their own."""
    rng = np.random.default_rng(seed)
    return {
        n: [Series(COMPUTE, reward(n, COMPUTE) + std * rng.standard_normal()) for _ in range(seeds)]
        for n in rollouts
    }


def chosen(found: RolloutAllocation) -> list[float]:
    return [estimate.value for estimate in found.best]


def sigmoid(found: RolloutAllocation) -> tuple[Estimate, ...]:
    return found.low, found.high, found.c_mid, found.b


def nearest(compute: float, rollouts=ROLLOUTS) -> int:
    return min(rollouts, key=lambda n: abs(math.log(n / best(compute))))


def test_each_budget_gets_the_n_that_is_best_there():
    found = allocate_rollouts(runs(2, 0.0))
    assert found.budgets_K[[0, -1]] == pytest.approx([200, 500_000])
    clear = [  # a choice between two n that are as good is anybody's
        k
        for k, c in enumerate(found.budgets_K)
        if abs(math.log(nearest(c) / best(c))) < 0.45 * math.log(2)
    ]
    assert len(clear) > 25
    assert [chosen(found)[k] for k in clear] == [nearest(found.budgets_K[k]) for k in clear]
    for k, c in enumerate(found.budgets_K):
        for i, n in enumerate(ROLLOUTS):
            assert found.reward_KN[k, i] == pytest.approx(reward(n, c), abs=1e-3)


def test_the_sigmoid_is_the_truth_where_reward_is_a_parabola_in_log_n():
    found = allocate_rollouts(runs(2, 0.0))
    for estimate, truth in zip(sigmoid(found), (LOW, HIGH, C_MID, B), strict=True):
        assert estimate.value == pytest.approx(truth, rel=0.02)
        assert [estimate.low, estimate.high] == pytest.approx([estimate.value] * 2)
    assert found.predict(30_000).value == pytest.approx(best(30_000), rel=0.01)
    assert found.problems == ()


def test_the_sigmoid_is_that_of_scipy():
    found = allocate_rollouts(runs(3, 0.004), budgets=np.geomspace(300, 400_000, 60))
    log_n = []
    for rewards in found.reward_KN:
        i = int(rewards.argmax())
        bend, slope, _ = np.polyfit(np.log(ROLLOUTS[i - 1 : i + 2]), rewards[i - 1 : i + 2], 2)
        log_n.append(-slope / (2 * bend))

    def logarithmic(compute, low, high, log_mid, log_b):
        return low + (high - low) / (1 + np.exp(np.exp(log_b) * (log_mid - np.log(compute))))

    start = np.log([LOW, HIGH, C_MID, B])
    scipys, _ = curve_fit(logarithmic, found.budgets_K, log_n, start)
    assert [x.value for x in sigmoid(found)] == pytest.approx(np.exp(scipys), rel=1e-4)


def held(found: RolloutAllocation) -> list[bool]:
    truths = zip(sigmoid(found), (LOW, HIGH, C_MID, B), strict=True)
    return [estimate.low <= truth <= estimate.high for estimate, truth in truths]


def test_intervals_over_seeds_hold_what_is_true():
    found = [allocate_rollouts(runs(6, 0.001, seed=seed)) for seed in range(6)]
    assert np.mean([held(each) for each in found]) >= 0.8
    for estimate, budget in zip(found[0].best, found[0].budgets_K, strict=True):
        assert estimate.low <= nearest(budget) <= estimate.high
        assert {estimate.low, estimate.high} <= set(ROLLOUTS)
    np.testing.assert_allclose(found[0].support_KN.sum(axis=1), 1)
    noisier = allocate_rollouts(runs(6, 0.02))
    spread = [np.mean([e.high / e.low for e in each.best]) for each in (found[0], noisier)]
    assert spread[1] > spread[0]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 6])
@pytest.mark.parametrize("std", [0.001, 0.004])
def test_coverage(seeds, std):
    rates = np.mean([held(allocate_rollouts(runs(seeds, std, seed=s))) for s in range(100)], axis=0)
    print(f"{seeds} seeds, noise {std}: {rates}")
    assert rates.min() >= 0.8


def test_where_the_largest_n_wins_saturation_is_not_identified():
    found = allocate_rollouts(runs(2, 0.0, [2, 4, 8, 16, 32]))
    assert found.high.high == math.inf
    assert math.isnan(found.high.value)
    assert any("saturates is not identified: n* = 32 is possible" in p for p in found.problems)
    assert found.predict(1e7).high == math.inf
    assert found.predict(50_000).value == pytest.approx(32, rel=0.1)


def test_where_the_smallest_n_wins_the_lower_level_is_not_identified():
    found = allocate_rollouts(runs(2, 0.0, [16, 32, 64, 128]))
    assert found.low.low == 0
    assert found.high.value == pytest.approx(HIGH, rel=0.1)
    assert any(p.startswith("n* at small compute is not identified") for p in found.problems)
    assert math.isnan(found.predict(10).value)


def test_an_n_that_is_best_everywhere_has_no_sigmoid():
    found = allocate_rollouts(runs(2, 0.0, [64, 2]), budgets=[1e5, 2e5, 3e5, 4e5])
    assert set(chosen(found)) == {64}
    assert found.problems == ("n* is 64 at every budget: where it would change is not known",)
    assert math.isnan(found.high.value)


def test_one_seed_gives_a_choice_without_an_interval():
    found = allocate_rollouts(runs(1, 0.0))
    assert chosen(found) == chosen(allocate_rollouts(runs(2, 0.0)))
    assert found.problems[0] == "no interval is known: n = 2 has one seed"
    every = (*found.best, *sigmoid(found), found.predict(30_000))
    assert all((e.low, e.high) == (0, math.inf) for e in every)


def test_an_n_is_compared_only_where_it_was_measured():
    late = {
        n: [Series(s.x * n, s.y) for s in group] for n, group in runs(2, 0.0, [2, 4, 8]).items()
    }
    found = allocate_rollouts(late)
    assert found.budgets_K[[0, -1]] == pytest.approx([200 * 4, 500_000 * 2])
    assert np.isnan(found.reward_KN[found.budgets_K < 1600 * 0.999, 2]).all()
    assert np.isfinite(found.reward_KN[:, :2]).all()


def test_noise_within_a_curve_does_not_lift_it():
    """Records of a noisy flat curve rise with every look; its monotone fit stays in the middle."""
    rng = np.random.default_rng(0)
    noisy = [Series(COMPUTE, 0.5 + 0.1 * rng.standard_normal(COMPUTE.size)) for _ in range(3)]
    better = [Series(COMPUTE, np.full(COMPUTE.size, 0.58)) for _ in range(3)]
    found = allocate_rollouts({4: noisy, 8: better})
    assert np.mean(np.array(chosen(found)) == 8) > 0.9
    assert max(np.maximum.accumulate(s.y)[-1] for s in noisy) > 0.7


@pytest.mark.parametrize(
    ("which", "budgets", "message"),
    [
        ({}, None, r"n = \[\]: two values of n or more"),
        ({4: 1}, None, r"n = \[4\]: two values of n or more"),
        ({4: 1, 8: 0}, None, r"n = \[4, 8\]: two values of n or more, each with a curve"),
        ({0: 1, 8: 1}, None, "two values of n or more"),
        ({4: 1, 8: 1}, [300, 400, 500], "budgets: 4 or more are needed"),
        ({4: 1, 8: 1}, [10, 400, 500, 600, 700], "all within 200 to 500000"),
        ({4: 1, 8: 1}, [300, 400, 500, 600, 1e6], "all within 200 to 500000"),
    ],
)
def test_runs_that_cannot_be_compared(which, budgets, message):
    curves = {n: [Series(COMPUTE, reward(4, COMPUTE))] * count for n, count in which.items()}
    with pytest.raises(UserError, match=message):
        allocate_rollouts(curves, budgets=budgets)


def test_curves_that_never_meet():
    apart = {4: [Series([1, 2, 3], [0, 0, 0])], 8: [Series([4, 5, 6], [0, 0, 0])]}
    with pytest.raises(UserError, match="first measured at 4, and the first curve ends at 3"):
        allocate_rollouts(apart)
    with pytest.raises(UserError, match="start: has no values at a compute above 0"):
        allocate_rollouts({4: [Series([0], [1], "start")], 8: apart[8]})
