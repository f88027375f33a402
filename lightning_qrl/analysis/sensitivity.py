"""Which layers cost a policy most when they are quantized, and what it takes to spare them.

The cost of quantizing a set of layers is the mean |Δlogprob|: on completions that the unquantized
policy sampled, how far their log-probabilities move, a mean over tokens. For each group of layers

    alone   the cost of quantizing this group and nothing else
    saved   the cost of quantizing everything, less that of sparing this group
    bytes   what sparing adds to the weights: 16 bits instead of the format's

and groups are ranked by saved / bytes. Costs do not add up: independent errors add in squares, so
that sparing a second group often saves more than sparing it alone. So the way to more protection is
walked, not summed: from everything quantized, the group that saves most per byte *given those
spared before* is spared next, until nothing is quantized.

Intervals are 95% percentile bootstraps over completions, `RESAMPLES` of them, of the ratio of
summed |Δ| to summed tokens; all costs share the resamples, so that differences are paired. They
speak of the sampling of completions alone, not of another policy or another seed of training.

This is the layer-group ablation of "The 4-bitter Lesson" (mean |Δlogprob| against memory), which
chose its groups by hand.

B completions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 1000
Layers = frozenset[str]
Measure = Callable[[Layers], Tensor]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What one group of layers costs.

    Attributes:
        name: the group.
        layers: how many layers it has.
        quantized_bytes: of its weights as the recipe quantizes them.
        extra_bytes: what sparing it adds.
        alone: mean |Δlogprob| with this group alone quantized.
        saved: what sparing this group alone takes off the mean |Δlogprob|.
    """

    name: str
    layers: int
    quantized_bytes: float
    extra_bytes: float
    alone: Estimate
    saved: Estimate

    @property
    def saved_per_byte(self) -> float:
        """What the ranking is by; a group that costs no byte is free."""
        return _per_byte(self.saved.value, self.extra_bytes)


@dataclass(frozen=True, slots=True)
class Spared:
    """A set of groups that was spared, and what is left of the cost.

    Attributes:
        groups: their names, in the order of sparing.
        extra_bytes: what sparing them adds.
        cost: mean |Δlogprob| with everything else quantized.
    """

    groups: tuple[str, ...]
    extra_bytes: float
    cost: Estimate


class Sensitivity:
    """Measures groups of layers.

    Args:
        measure: summed |Δlogprob| of each completion when these layers are quantized, [B].
        tokens_B: sampled tokens of each completion.
        groups: the layers of each group.
        quantized_bytes: bytes of each layer's weight as it is quantized; these layers, and no
            others, are what can be quantized.
        extra_bytes: bytes that sparing each layer adds.
        seed: of the bootstrap.
    """

    def __init__(
        self,
        measure: Measure,
        tokens_B: Tensor,
        groups: Mapping[str, Layers],
        quantized_bytes: Mapping[str, float],
        extra_bytes: Mapping[str, float],
        seed: int = 0,
    ) -> None:
        self.groups = groups
        self.everything = frozenset(quantized_bytes)
        self.completions, self.tokens = len(tokens_B), int(tokens_B.sum())
        self._measure = measure
        self._quantized_bytes = quantized_bytes
        self._extra_bytes = extra_bytes
        self._known: dict[Layers, Tensor] = {}
        count = len(tokens_B)
        draws = torch.randint(
            count, (RESAMPLES, count), generator=torch.Generator().manual_seed(seed)
        )
        resampled_RB = torch.zeros(RESAMPLES, count, dtype=torch.float64)
        resampled_RB.scatter_add_(1, draws, torch.ones_like(resampled_RB))
        # Row 0 is the sample itself.
        self._weights_RB = torch.cat([resampled_RB.new_ones(1, count), resampled_RB])
        self._tokens_R = self._weights_RB @ tokens_B.double()

    def cost(self, quantized: Layers) -> Estimate:
        """The mean |Δlogprob| of quantizing these layers and sparing all others."""
        return _estimate(self._means(quantized))

    def saved(self, spared: Layers) -> Estimate:
        """What sparing these layers takes off the cost of quantizing everything."""
        return _estimate(self._means(self.everything) - self._means(self.everything - spared))

    def difference(self, group: str, other: str) -> Estimate:
        """How much more sparing one group saves than sparing another; paired."""
        layers, others = (self.everything - self.groups[name] for name in (group, other))
        return _estimate(self._means(others) - self._means(layers))

    def rank(self) -> list[GroupCost]:
        """Every group, the one that saves most per byte first."""
        costs = [
            GroupCost(
                name=name,
                layers=len(layers),
                quantized_bytes=sum(self._quantized_bytes[layer] for layer in layers),
                extra_bytes=self._extra(layers),
                alone=self.cost(layers),
                saved=self.saved(layers),
            )
            for name, layers in self.groups.items()
        ]
        return sorted(costs, key=lambda cost: -cost.saved_per_byte)

    def walk(self) -> list[Spared]:
        """From nothing spared to everything, group by group, most saved per byte first."""
        spared: Layers = frozenset()
        steps = [self._spare(())]
        while left := [name for name, layers in self.groups.items() if not layers <= spared]:
            best = max(left, key=lambda name: self._gain(name, spared))
            spared |= self.groups[best]
            steps.append(self._spare((*steps[-1].groups, best)))
        return steps

    def choose(self, walk: list[Spared], target: float) -> Spared:
        """The smallest set that reaches a target, of those that the walk tried.

        Those are its steps and, at each step, every group that could have been spared next; less
        the groups that the set can do without.

        Args:
            walk: see `walk`.
            target: share of the cost of quantizing everything that is to be taken off, 0 to 1.
        """
        limit = (1 - target) * walk[0].cost.value
        tried = [
            self._spare((*step.groups, name))
            for step in walk[:-1]
            for name, layers in self.groups.items()
            if not layers <= self._layers(step.groups)
        ]
        enough = [spared for spared in (*walk, *tried) if spared.cost.value <= limit]
        smallest = min(enough, key=lambda s: (s.extra_bytes, s.cost.value), default=walk[-1])
        chosen = smallest
        for group in smallest.groups:  # the earliest were chosen knowing least
            without = self._spare([name for name in chosen.groups if name != group])
            if without.cost.value <= limit:
                chosen = without
        return chosen

    def _spare(self, groups: Sequence[str]) -> Spared:
        layers = self._layers(groups)
        return Spared(tuple(groups), self._extra(layers), self.cost(self.everything - layers))

    def _layers(self, groups: Sequence[str]) -> Layers:
        return frozenset[str]().union(*(self.groups[name] for name in groups))

    def _gain(self, group: str, spared: Layers) -> float:
        """What sparing one more group saves per byte."""
        more = self.groups[group] - spared
        before = self.cost(self.everything - spared).value
        after = self.cost(self.everything - spared - more).value
        return _per_byte(before - after, self._extra(more))

    def _extra(self, layers: Layers) -> float:
        return sum(self._extra_bytes[layer] for layer in layers)

    def _means(self, quantized: Layers) -> Tensor:
        """The cost in the sample and in each resample, [1 + RESAMPLES]."""
        if quantized not in self._known:
            self._known[quantized] = self._weights_RB @ self._measure(quantized).double()
        return self._known[quantized] / self._tokens_R


def _estimate(values_R: Tensor) -> Estimate:
    low, high = values_R[1:].quantile(torch.tensor([0.025, 0.975], dtype=values_R.dtype)).tolist()
    return Estimate(float(values_R[0]), low, high)


def _per_byte(saved: float, extra_bytes: float) -> float:
    return saved / extra_bytes if extra_bytes else math.copysign(math.inf, saved)
