"""Means, sums, minima and maxima that can be merged over micro-batches and ranks.

A mean is kept as a total and a weight and divided once, at the end: a mean over all tokens of a
step, never a mean of the means of unequal micro-batches.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

REDUCTIONS: dict[str, Callable[[float, float], float]] = {
    "sum": operator.add,
    "min": min,
    "max": max,
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that several micro-batches contribute to."""

    reduce: Literal["mean", "sum", "min", "max"]
    total: float
    weight: float = 1.0

    def merge(self, other: "Metric") -> "Metric":
        """The number over both contributions; one without weight contributes nothing."""
        if not (self.weight and other.weight):
            return self if self.weight else other
        if self.reduce == "mean":
            return Metric("mean", self.total + other.total, self.weight + other.weight)
        return Metric(self.reduce, REDUCTIONS[self.reduce](self.total, other.total))

    def value(self) -> float:
        """The reduced number; over nothing it is 0."""
        return self.total / self.weight if self.weight else 0.0


def mean(values: Tensor, mask: Tensor) -> Metric:
    """The mean of ``values`` where ``mask`` (same shape, bool) is true."""
    return Metric("mean", float(values[mask].double().sum()), float(mask.sum()))


def largest(values: Tensor) -> Metric:
    """The maximum of a tensor; an empty one contributes nothing."""
    return Metric("max", float(values.max())) if values.numel() else Metric("max", 0.0, 0.0)


def smallest(values: Tensor) -> Metric:
    """The minimum of a tensor; an empty one contributes nothing."""
    return Metric("min", float(values.min())) if values.numel() else Metric("min", 0.0, 0.0)


class Tally:
    """Metrics that are collected over the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Merge the metrics of one micro-batch."""
        for name, metric in metrics.items():
            seen = self._metrics.get(name)
            self._metrics[name] = metric if seen is None else seen.merge(metric)

    def flush(self) -> dict[str, float]:
        """The value of every metric over all micro-batches and ranks; then start anew."""
        metrics, self._metrics = self._metrics, {}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            metrics = _over_ranks(metrics)
        return {name: metric.value() for name, metric in metrics.items()}


def _over_ranks(metrics: dict[str, Metric]) -> dict[str, Metric]:
    gathered: list[dict[str, Metric]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, metrics)
    total = Tally()
    for one in gathered:
        total.add(one)
    return total._metrics
