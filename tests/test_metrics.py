"""Metrics merge as if all micro-batches had been one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_qrl.metrics import Metric, Tally, deviation, effective_share, largest, mean, smallest


def test_a_mean_is_over_all_elements_not_over_the_parts():
    parts = [torch.tensor([1.0]), torch.tensor([2.0, 3.0, 4.0]), torch.tensor([])]
    tally = Tally()
    for part in parts:
        tally.add({"m": mean(part, torch.ones_like(part, dtype=torch.bool))})
    assert tally.flush() == {"m": 2.5}  # the mean of means would be 2


def test_only_masked_elements_count():
    values = torch.tensor([[1.0, float("nan")], [3.0, 100.0]])
    mask = torch.tensor([[True, False], [True, False]])
    assert mean(values, mask) == Metric("mean", 4.0, 2.0)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_empty_part_leaves_minimum_and_maximum_alone(sign):
    full, empty = sign * torch.tensor([2.0, 3.0]), torch.tensor([])
    for order in ([full, empty], [empty, full]):
        tally = Tally()
        for part in order:
            tally.add({"min": smallest(part), "max": largest(part)})
        assert tally.flush() == {"min": float(full.min()), "max": float(full.max())}


def test_over_nothing_every_number_is_zero():
    nothing = torch.tensor([])
    metrics = {"a": mean(nothing, nothing.bool()), "b": smallest(nothing), "c": largest(nothing)}
    tally = Tally()
    tally.add(metrics)
    assert tally.flush() == {"a": 0.0, "b": 0.0, "c": 0.0}


def test_sums_add_and_a_flush_starts_anew():
    tally = Tally()
    tally.add({"n": Metric("sum", 2.0)})
    tally.add({"n": Metric("sum", 0.0), "other": Metric("sum", -1.0)})
    assert tally.flush() == {"n": 2.0, "other": -1.0}
    tally.add({"n": Metric("sum", 5.0)})
    assert tally.flush() == {"n": 5.0}


# ---- deviations ----------------------------------------------------------------------------------


def merged(values, cuts):
    """The deviation of values that were seen in parts, of which some may be empty."""
    tally = Tally()
    for part in torch.tensor(values).tensor_split(sorted(cuts)):
        tally.add({"std": deviation(part, torch.ones_like(part, dtype=torch.bool))})
    return tally.flush()["std"]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_deviation_is_over_all_values_however_they_are_split(data):
    reward = st.floats(-1000, 1000, width=32)
    values = data.draw(st.lists(reward, min_size=2, max_size=12))
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=4))
    want = np.std(np.array(values), ddof=1)
    assert merged(values, cuts) == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_a_large_offset_costs_a_deviation_no_digits():
    g = torch.Generator().manual_seed(0)
    values = (1e6 + torch.randint(0, 2, (100,), generator=g)).tolist()
    assert merged(values, [1, 30, 31]) == pytest.approx(np.std(values, ddof=1), rel=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e6])
@pytest.mark.parametrize("cuts", [[], [3], [0, 1, 1, 5]])
def test_equal_values_deviate_by_exactly_nothing(value, cuts):
    assert merged([value] * 7, cuts) == 0.0


@pytest.mark.parametrize("values", [[], [3.0]])
def test_a_deviation_of_less_than_two_values_is_zero(values):
    assert merged(values, [0]) == 0.0


def test_a_deviation_of_masked_values():
    values = torch.tensor([1.0, float("nan"), 3.0])
    metric = deviation(values, values.isfinite())
    assert metric.value() == pytest.approx(2**0.5)
    assert (metric.total, metric.weight, metric.squares) == (4.0, 2.0, 2.0)


# ---- effective sample sizes ----------------------------------------------------------------------


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_an_effective_sample_size_in_parts_is_that_of_the_whole(values, cuts):
    tally = Tally()
    for part in torch.tensor(values, dtype=torch.float64).tensor_split(sorted(cuts)):
        tally.add({"ess": effective_share(part.log(), torch.ones_like(part, dtype=torch.bool))})
    w = np.array(values)
    want = w.sum() ** 2 / (w**2).sum() / len(w)
    assert tally.so_far("ess") == pytest.approx(want)
    assert tally.flush() == {"ess": pytest.approx(want)}


def test_equal_weights_lose_no_sample_and_weights_of_zero_leave_none():
    everywhere = torch.ones(7, dtype=torch.bool)
    assert effective_share(torch.full((7,), 0.1).log(), everywhere).value() == pytest.approx(1.0)
    assert effective_share(torch.zeros(7), everywhere).value() == 1.0
    assert effective_share(torch.zeros(7).log(), everywhere).value() == 0.0
    assert effective_share(torch.zeros(7), ~everywhere).value() == 0.0


def test_an_effective_sample_size_depends_on_ratios_of_weights_alone():
    """Weights of e^2000 and of e^-2000, in parts of different size: no float holds them."""
    logs = torch.tensor([0.3, -1.0, 0.7, 2.0], dtype=torch.float64)
    w = np.exp(logs.numpy())
    want = w.sum() ** 2 / (w**2).sum() / 4
    for shift in (-2000.0, 2000.0):
        tally = Tally()
        for part in (logs + shift).tensor_split([1, 3]):
            tally.add({"ess": effective_share(part, torch.ones_like(part, dtype=torch.bool))})
        assert tally.flush()["ess"] == pytest.approx(want)
