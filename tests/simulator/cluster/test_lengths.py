"""Lengths have the distribution they were given, and depend on nothing but seed and number."""

import numpy as np
import pytest
from scipy import stats

from lightning_qrl.simulator.cluster import Empirical, Lognormal
from lightning_qrl.simulator.cluster.lengths import BLOCK, Stream


def first(lengths, count, seed=0):
    stream = Stream(lengths, seed)
    return [stream.next() for _ in range(count)]


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_lognormal_lengths_are_lognormal(spread):
    # Kolmogorov-Smirnov against scipy's, of lengths so large that whole tokens do not show.
    drawn = first(Lognormal(mean=1e6, spread=spread, limit=10**9), 20_000)
    sigma = np.sqrt(np.log1p(spread**2))
    expected = stats.lognorm(s=sigma, scale=1e6 * np.exp(-(sigma**2) / 2))
    assert expected.mean() == pytest.approx(1e6)
    assert expected.std() == pytest.approx(spread * 1e6)
    assert stats.kstest(drawn, expected.cdf).pvalue > 0.01


def test_the_limit_cuts():
    drawn = first(Lognormal(mean=100, spread=2.0, limit=120), 2000)
    assert max(drawn) == 120
    assert min(drawn) >= 1


def test_without_a_spread_there_is_one_length():
    assert set(first(Lognormal(mean=700, spread=0, limit=800), 50)) == {700}


def test_measured_lengths_come_as_often_as_they_were_measured():
    drawn = first(Empirical(values=(5, 5, 5, 40)), 8000)
    counts = [drawn.count(5), drawn.count(40)]
    assert sum(counts) == 8000
    assert stats.chisquare(counts, [6000, 2000]).pvalue > 0.01


def test_a_seed_gives_the_same_lengths_and_another_seed_others():
    lengths = Lognormal(mean=1e6, spread=0.5, limit=10**9)
    drawn = first(lengths, 2 * BLOCK + 5)
    assert drawn == first(lengths, 2 * BLOCK + 5)
    assert len(set(drawn)) > 2 * BLOCK - 100, "blocks repeat"
    assert drawn[:50] != first(lengths, 50, seed=1)
