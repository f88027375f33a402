"""Paired differences: width and p by Student, coverage by simulation, Holm by definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats

from lightning_qrl.analysis import paired as module
from lightning_qrl.analysis.paired import holm, paired


@pytest.mark.parametrize("pairs", [2, 3, 5, 12])
def test_p_and_the_width_are_those_of_a_paired_t_test(pairs):
    arm_N, other_N = np.random.default_rng(pairs).standard_normal((2, pairs))
    found, expected = paired(arm_N, other_N), stats.ttest_rel(arm_N, other_N)
    assert (found.pairs, found.mean) == (pairs, pytest.approx((arm_N - other_N).mean()))
    assert found.p == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval(0.95)
    assert found.high - found.low == pytest.approx(high - low)


def test_the_bootstrap_says_how_much_of_the_width_is_on_either_side():
    difference_N = np.array([0.0, 0.1, 0.2, 0.3, 2.0])
    found = paired(difference_N, np.zeros(5))
    below, above = found.mean - found.low, found.high - found.mean
    bootstrapped = stats.bootstrap(
        (difference_N,), np.mean, n_resamples=20_000, method="percentile", rng=0
    ).confidence_interval
    expected = (bootstrapped.high - found.mean) / (found.mean - bootstrapped.low)
    assert expected > 1.3
    assert above / below == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("pairs", [2, 3, 5, 10])
def test_the_interval_holds_the_mean_of_normal_differences_as_often_as_it_says(pairs):
    rng, experiments = np.random.default_rng(0), 2000
    other_N = np.zeros(pairs)
    held = rejected = 0
    for draw_N in rng.normal(0.3, 1.0, (experiments, pairs)):
        found = paired(draw_N, other_N)
        held += found.low <= 0.3 <= found.high
        rejected += paired(draw_N - 0.3, other_N).p < 0.05
    low, high = stats.binom.ppf([0.001, 0.999], experiments, 0.95)
    assert low <= held <= high
    assert experiments - high <= rejected <= experiments - low


def test_too_few_pairs_conclude_nothing():
    one = paired([0.5], [0.2])
    assert (one.pairs, one.mean) == (1, pytest.approx(0.3))
    assert all(map(math.isnan, (one.low, one.high, one.p)))
    none = paired([], [])
    assert none.pairs == 0
    assert all(map(math.isnan, (none.mean, none.low, none.high, none.p)))


def test_differences_without_spread_are_judged_by_their_signs():
    same = paired([0.1, 0.7, 0.3], [0.1, 0.7, 0.3])
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)
    for pairs in (2, 5, 6):
        other_N = np.arange(pairs) / 10  # 0.1 is no binary fraction: equal but for rounding
        shifted = paired(other_N + 0.1, other_N)
        assert shifted.p == pytest.approx(stats.binomtest(pairs, pairs).pvalue)
        assert shifted.low == shifted.high == shifted.mean == pytest.approx(0.1)
    large = paired([1e9 + 1e-7, 1e9], [1e9, 1e9])  # a last bit is no difference
    assert large.p == 1


def test_holm_on_an_example_by_hand():
    assert holm([0.01, 0.04, math.nan, 0.03, 0.005]) == pytest.approx(
        [0.03, 0.06, math.nan, 0.06, 0.02], nan_ok=True
    )
    assert holm([]) == []
    assert holm([0.6, 0.9]) == [1.0, 1.0]


@given(some.lists(some.floats(0, 1), max_size=8), some.floats(0.001, 0.2))
def test_holm_rejects_what_the_procedure_rejects(p_A, level):
    """Step down from the smallest, and stop at the first that is not below level / (left)."""
    rejected = set()
    for rank, index in enumerate(sorted(range(len(p_A)), key=lambda i: p_A[i])):
        if p_A[index] * (len(p_A) - rank) >= level:
            break
        rejected.add(index)
    # ties with a rejected one are rejected too, in either form
    assert {i for i, p in enumerate(holm(p_A)) if p < level} == rejected


DRAWS = {
    "normal": (lambda rng, size: rng.standard_normal(size), 0.0),
    "Student's t(3)": (lambda rng, size: rng.standard_t(3, size), 0.0),
    "uniform": (lambda rng, size: rng.random(size), 0.5),
    "-1, 0 or 1, alike": (lambda rng, size: rng.integers(-1, 2, size).astype(float), 0.0),
    "lognormal": (lambda rng, size: np.exp(rng.standard_normal(size)), math.exp(0.5)),
    "1 with chance 0.2": (lambda rng, size: (rng.random(size) < 0.2).astype(float), 0.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_the_table_of_coverage(name):
    """The one in the module's docstring."""
    (line,) = [own for own in module.__doc__.splitlines() if own.strip().startswith(f"{name}  ")]
    stated = [float(number) for number in line.replace(name, "").split()]
    draw, mean = DRAWS[name]
    for pairs, percent in zip((2, 3, 5, 10, 20), stated, strict=True):
        samples = draw(np.random.default_rng(pairs), (10_000, pairs))
        results = [paired(sample_N, np.zeros(pairs)) for sample_N in samples]
        held = np.mean([found.low <= mean <= found.high for found in results])
        print(name, pairs, f"{100 * held:.1f}")
        error = 100 * math.sqrt(held * (1 - held) / len(samples))
        assert 100 * held == pytest.approx(percent, abs=4.5 * error)  # of two simulations
