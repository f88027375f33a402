"""Means, deviations, sums, extrema, sample sizes that merge over micro-batches and ranks.

A mean is kept as a total and a weight and divided once, at the end: a mean over all tokens of a
step, never a mean of the means of unequal micro-batches. A standard deviation is kept with its sum
of squared deviations, and merged as in Chan, Golub & LeVeque (1979). The effective sample size of
importance weights w is kept as sum w and sum w^2 (Kish, 1965).
"""

import math
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
    """One number that several micro-batches contribute to.

    Attributes:
        reduce: how contributions merge.
        total: the sum of the values (of a minimum or maximum: itself).
        weight: the number of values.
        squares: of a standard deviation, the sum of squared deviations from the mean; of an
            effective sample size, the sum of squares.
        shift: of an effective sample size, the log of what its weights were divided by: it depends
            on their ratios alone, and the weights themselves may be beyond any float.
    """

    reduce: Literal["mean", "std", "sum", "min", "max", "ess"]
    total: float
    weight: float = 1.0
    squares: float = 0.0
    shift: float = 0.0

    def merge(self, other: "Metric") -> "Metric":
        """The number over both contributions; one without weight contributes nothing."""
        if not (self.weight and other.weight):
            return self if self.weight else other
        if self.reduce == "mean":
            return Metric("mean", self.total + other.total, self.weight + other.weight)
        if self.reduce == "std":
            return self._merge_deviations(other)
        if self.reduce == "ess":
            return self._merge_weights(other)
        return Metric(self.reduce, REDUCTIONS[self.reduce](self.total, other.total))

    def value(self) -> float:
        """The reduced number; over nothing (a deviation: over less than two) it is 0."""
        if self.reduce == "std":
            return math.sqrt(self.squares / (self.weight - 1)) if self.weight > 1 else 0.0
        if self.reduce == "ess":
            return self.total**2 / (self.weight * self.squares) if self.squares else 0.0
        return self.total / self.weight if self.weight else 0.0

    def over_ranks(self) -> "Metric":
        """The number over the contributions of all ranks."""
        return _over_ranks({"": self})[""] if _several_ranks() else self

    def _merge_weights(self, other: "Metric") -> "Metric":
        shift = max(self.shift, other.shift)
        own, theirs = math.exp(self.shift - shift), math.exp(other.shift - shift)
        total = self.total * own + other.total * theirs
        squares = self.squares * own**2 + other.squares * theirs**2
        return Metric("ess", total, self.weight + other.weight, squares, shift)

    def _merge_deviations(self, other: "Metric") -> "Metric":
        weight = self.weight + other.weight
        apart = other.total / other.weight - self.total / self.weight
        between = apart**2 * self.weight * other.weight / weight
        squares = self.squares + other.squares + between
        return Metric("std", self.total + other.total, weight, squares)


def mean(values: Tensor, mask: Tensor) -> Metric:
    """The mean of ``values`` where ``mask`` (same shape, bool) is true."""
    return Metric("mean", float(values[mask].double().sum()), float(mask.sum()))


def deviation(values: Tensor, mask: Tensor) -> Metric:
    """The sample standard deviation (ddof 1) of ``values`` where ``mask`` is true."""
    chosen = values[mask].double()
    squares = (chosen - chosen.mean()).square().sum() if len(chosen) else chosen.sum()
    return Metric("std", float(chosen.sum()), float(len(chosen)), float(squares))


def effective_share(log_weights: Tensor, mask: Tensor) -> Metric:
    """Effective sample size over the number of samples: (sum w)^2 / (N sum w^2) where ``mask``.

    Args:
        log_weights: log w, of any size; minus infinity for a weight of 0.
        mask: bool, the same shape.
    """
    chosen = log_weights[mask].double()
    shift = float(chosen.max()) if len(chosen) else 0.0
    if shift == -math.inf:
        return Metric("ess", 0.0, float(len(chosen)))
    weights = (chosen - shift).exp()
    total, squares = float(weights.sum()), float(weights.square().sum())
    return Metric("ess", total, float(len(chosen)), squares, shift)


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

    def so_far(self, name: str) -> float:
        """The value of one metric over what all ranks have collected."""
        return self._metrics[name].over_ranks().value()

    def flush(self) -> dict[str, float]:
        """The value of every metric over all micro-batches and ranks; then start anew."""
        metrics, self._metrics = self._metrics, {}
        if _several_ranks():
            metrics = _over_ranks(metrics)
        return {name: metric.value() for name, metric in metrics.items()}


def _several_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _over_ranks(metrics: dict[str, Metric]) -> dict[str, Metric]:
    gathered: list[dict[str, Metric]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, metrics)
    total = Tally()
    for one in gathered:
        total.add(one)
    return total._metrics
