"""Histories made ready to be drawn, against scipy and loops by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_qrl.reports.numbers import shortened
from lightning_qrl.reports.page.axis import Quantity, axis_for
from lightning_qrl.reports.page.look import log_ticks, number
from lightning_qrl.reports.page.series import (
    BINS,
    band_for,
    smoothed,
    spread,
    thinned,
    thinned_band,
)
from lightning_qrl.tracking.histories import History


def history(values, first=0):
    values = np.asarray(values, dtype=float)
    return History(np.arange(first, first + len(values)), values)


def test_a_band_of_four_seeds_is_students_interval_of_the_mean():
    values_NS = np.random.default_rng(0).lognormal(size=(4, 6))
    over = spread([history(row) for row in values_NS], "interval")
    error = stats.sem(values_NS)
    low, high = stats.t.interval(0.95, 3, loc=values_NS.mean(axis=0), scale=error)
    np.testing.assert_allclose(over.middle, values_NS.mean(axis=0))
    np.testing.assert_allclose(over.low, low)
    np.testing.assert_allclose(over.high, high)


def test_a_mean_is_drawn_only_where_every_seed_has_a_value():
    over = spread([history([1, 2, 3, 4]), history([3, np.nan, np.inf], 1)], "range")
    np.testing.assert_array_equal(over.steps, [1, 2, 3])
    np.testing.assert_array_equal(over.middle, [2.5, np.nan, np.nan])
    np.testing.assert_array_equal(over.low, [2, np.nan, np.nan])
    np.testing.assert_array_equal(over.high, [3, np.nan, np.nan])


@pytest.mark.parametrize(
    ("counts", "band"),
    [([1, 1], "none"), ([0, 1], "none"), ([3, 5], "range"), ([1, 2], "range"), ([4, 5], "interval"),
     ([1, 4], "interval")],
)  # fmt: skip
def test_one_kind_of_band_suits_all_arms(counts, band):
    assert band_for(counts) == band


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-9, 9) | st.just(np.nan), min_size=1, max_size=30), st.integers(0, 4))
def test_smoothing_is_a_mean_over_the_values_around(values, half):
    found = smoothed(history(values), 2 * half + 1).values
    for i, value in enumerate(values):
        around = np.array(values[max(0, i - half) : i + half + 1])
        expected = np.nan if np.isnan(value) else np.nanmean(around)
        np.testing.assert_allclose(found[i], expected, atol=1e-12)


def test_thinning_keeps_extremes_gaps_and_ends_of_the_scale():
    rng = np.random.default_rng(2)
    values = rng.standard_normal(20_000)
    values[7_777], values[12_345], values[5_000:5_400], values[9_999] = 99, -99, np.nan, np.inf
    whole = history(values)
    thin = thinned(whole)
    assert len(thin.steps) <= 3 * BINS
    np.testing.assert_array_equal(thin.values, values[thin.steps])
    assert {7_777, 12_345, 9_999} <= set(thin.steps)
    assert np.isnan(thin.values[(thin.steps >= 5_000) & (thin.steps < 5_400)]).all()
    short = history(values[:100])
    assert thinned(short) is short


def test_a_thinned_band_holds_the_whole_one():
    rng = np.random.default_rng(3)
    over = spread([history(row) for row in rng.standard_normal((3, 4_000))], "range")
    steps, low, high = thinned_band(over)
    assert len(steps) == BINS
    place = np.searchsorted(steps, over.steps, side="right") - 1
    assert (low[place] <= over.low).all()
    assert (high[place] >= over.high).all()
    assert low.min() == over.low.min()


@settings(deadline=None)
@given(st.floats(-30, 30), st.floats(0.01, 40))
def test_a_log_axis_has_a_few_ticks_in_it(start, decades):
    low, high = 10**start, 10 ** (start + decades)
    ticks = log_ticks(low, high)
    assert 1 <= len(ticks) <= 8
    assert all(low * 0.99 <= tick <= high * 1.01 for tick in ticks) or len(ticks) == 1


def test_numbers_of_ticks():
    texts = [number(value) for value in (0, 0.001, 25, 9000, 10_000, 1e-7, -0.5, 2.5e12)]
    assert texts == ["0", "0.001", "25", "9000", "1e4", "1e−7", "−0.5", "2.5e12"]


def test_a_shortened_name_keeps_both_ends():
    name = "full, grpo.loss=gspo, rollout.max_staleness=8"
    assert shortened(name, 60) == name
    short = shortened(name, 24)
    assert len(short) <= 24
    assert short.startswith("full, ")
    assert short.endswith("ness=8")


def test_on_a_log_axis_zero_lies_on_the_lower_edge():
    quantity = Quantity("gap", "gap", "gap", log=True)
    values = [0.0, 1e-6, 1e-3, np.nan]
    axis = axis_for(quantity, {"full": {0: history(values), 1: history(np.zeros(4))}})
    bottom, top = axis.values
    zero, least, most, gap = axis.place(np.array(values))
    assert bottom < zero < 1e-6 == least < most < top
    assert np.isnan(gap)
    assert axis.ticks[1][zero] == "0"
    assert zero < axis.place(np.array([1e-300]))[0] < least
    assert axis.band == "range"
    positive = axis_for(quantity, {"full": {0: history([1e-6, 1e-3])}})
    assert positive.zero is None
    assert "0" not in positive.ticks[1].values()
