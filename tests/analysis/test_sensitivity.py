"""Sensitivity: costs and intervals by hand, the greedy way against an exhaustive one."""

import math

import pytest
import torch

from lightning_qrl.analysis.sensitivity import Sensitivity

WEIGHTS = {"a": 9.0, "b": 4.0, "c": 2.0, "d": 1.0}
SIZES = {"a": 100.0, "b": 10.0, "c": 10.0, "d": 10.0}
GROUPS = {
    "one": frozenset("a"),
    "two": frozenset("bc"),
    "three": frozenset("cd"),
    "four": frozenset("d"),
}


def toy(tokens=(2, 3, 5), noise=0.0, groups=GROUPS, extra=SIZES):
    """Quantizing layers costs the root of their summed weights a token."""
    tokens_B = torch.tensor(tokens)
    jitter_B = 1 + noise * torch.randn(len(tokens), generator=torch.Generator().manual_seed(0))
    calls = []

    def measure(quantized):
        calls.append(quantized)
        return math.sqrt(sum(WEIGHTS[layer] for layer in quantized)) * tokens_B * jitter_B

    made = Sensitivity(measure, tokens_B, groups, {n: s / 3 for n, s in SIZES.items()}, extra)
    return made, calls


def test_a_ranking_by_hand():
    ranking = toy()[0].rank()
    assert [cost.name for cost in ranking] == ["two", "three", "one", "four"]
    two = ranking[0]
    assert two.alone.value == pytest.approx(math.sqrt(6))
    assert two.saved.value == pytest.approx(4 - math.sqrt(10))
    assert (two.layers, two.extra_bytes) == (2, 20)
    assert two.quantized_bytes == pytest.approx(20 / 3)
    assert two.saved_per_byte == pytest.approx((4 - math.sqrt(10)) / 20)
    assert two.saved.low == pytest.approx(two.saved.high)  # all completions agree


def test_what_costs_no_byte_comes_first():
    free = {**SIZES, "d": 0.0}
    assert toy(extra=free)[0].rank()[0].name == "four"
    assert [len(step.groups) for step in toy(extra=free)[0].walk()][-1] >= 2


def test_the_walk_takes_the_best_group_at_every_step():
    sensitivity, calls = toy()
    walk = sensitivity.walk()
    assert len(calls) == len(set(calls))  # nothing is measured twice
    assert walk[0].groups == ()
    assert walk[-1].cost.value == 0
    assert walk[-1].extra_bytes == sum(SIZES.values())
    spared: frozenset[str] = frozenset()
    for before, after in zip(walk[:-1], walk[1:], strict=True):
        gains = {}
        for name, layers in GROUPS.items():
            more = layers - spared
            if more:
                left = math.sqrt(sum(w for n, w in WEIGHTS.items() if n not in spared | more))
                gains[name] = (before.cost.value - left) / sum(SIZES[n] for n in more)
        assert gains[after.groups[-1]] == pytest.approx(max(gains.values()))
        spared |= GROUPS[after.groups[-1]]


def test_the_choice_reaches_its_target_with_nothing_to_spare():
    # `two` comes first, and `both` makes it needless.
    groups = {"two": frozenset("bc"), "both": frozenset("abc"), "four": frozenset("d")}
    sensitivity, _ = toy(groups=groups)
    walk = sensitivity.walk()
    assert [step.groups[-1:] for step in walk] == [(), ("two",), ("both",), ("four",)]
    assert sensitivity.choose(walk, 0.2).groups == ("two",)
    assert sensitivity.choose(walk, 0.7).groups == ("both",)
    # A set that the walk passed over, for `both` saves more per byte than `four`.
    assert sensitivity.choose(walk, 0.24).groups == ("two", "four")
    for target in (0.1, 0.5, 0.9, 1.0):
        chosen = sensitivity.choose(walk, target)
        assert chosen.cost.value <= (1 - target) * 4 + 1e-12


def test_the_interval_is_that_of_a_ratio_of_means():
    tokens = [4] * 400
    estimate = toy(tokens, noise=0.5)[0].cost(frozenset("a"))
    jitter = 1 + 0.5 * torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    assert estimate.value == pytest.approx(3 * float(jitter.mean()), rel=1e-6)
    error = 3 * float(jitter.std()) / math.sqrt(400)
    assert estimate.low == pytest.approx(estimate.value - 1.96 * error, abs=0.2 * error)
    assert estimate.high == pytest.approx(estimate.value + 1.96 * error, abs=0.2 * error)


def test_differences_are_paired():
    sensitivity, _ = toy([4] * 100, noise=0.5)
    more = sensitivity.difference("two", "four")
    one, other = sensitivity.saved(GROUPS["two"]), sensitivity.saved(GROUPS["four"])
    assert more.value == pytest.approx(one.value - other.value)
    # Both are multiples of one number: so is the difference, without the noise of two samples.
    assert more.high - more.low == pytest.approx((one.high - one.low) - (other.high - other.low))
