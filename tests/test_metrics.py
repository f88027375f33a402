"""Metrics merge as if all micro-batches had been one."""

import pytest
import torch

from lightning_qrl.metrics import Metric, Tally, largest, mean, smallest


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
