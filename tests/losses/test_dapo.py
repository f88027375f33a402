"""DAPO's loss and gradient against a float64 evaluation, token by token, of its equation."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_qrl.losses.dapo import dapo

LOW, HIGH = 0.2, 0.28


def oracle(logprobs, experience):
    """Value, gradient and clip shares, in Python floats."""
    n, value, low, high = experience.step_tokens, 0.0, 0, 0
    gradient = torch.zeros(logprobs.shape, dtype=torch.float64)
    for b in range(logprobs.shape[0]):
        advantage = float(experience.advantages_B[b])
        for s in range(logprobs.shape[1]):
            if not experience.mask_BS[b, s]:
                continue
            ratio = math.exp(float(logprobs[b, s]) - float(experience.logprobs_BS[b, s]))
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            value -= min(ratio * advantage, clipped * advantage) / n
            too_low = advantage < 0 and ratio < 1 - LOW
            too_high = advantage > 0 and ratio > 1 + HIGH
            low, high = low + too_low, high + too_high
            if not (too_low or too_high):
                gradient[b, s] = -advantage * ratio / n
    return value, gradient, low, high


@pytest.mark.parametrize("spread", [0.05, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_value_gradient_and_clip_ratios(seed, spread, ragged):
    e = ragged(seed, rows=32)
    g = torch.Generator().manual_seed(seed)
    logprobs = e.logprobs_BS + spread * torch.randn(e.mask_BS.shape, generator=g)
    logprobs.requires_grad_()
    loss, metrics = dapo(logprobs, e, clip_low=LOW, clip_high=HIGH)
    loss.backward()
    value, gradient, low, high = oracle(logprobs.detach(), e)
    assert float(loss.detach()) == pytest.approx(value, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(logprobs.grad.double(), gradient, rtol=1e-5, atol=1e-7)
    n = int(e.mask_BS.sum())
    assert metrics["clip_ratio/low_mean"].value() == pytest.approx(low / n)
    assert metrics["clip_ratio/high_mean"].value() == pytest.approx(high / n)
    assert metrics["clip_ratio/region_mean"].value() == pytest.approx((low + high) / n)
    if spread > 1:
        assert low > 0
        assert high > 0


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "gradient"),
    [
        (2.0, 1.0, 0.0),  # already likelier than the clip allows
        (2.0, -1.0, -2 * math.exp(-1.0)),  # a good token that became unlikely: pulled back
        (-2.0, 1.0, 2 * math.exp(1.0)),  # a bad token that became likely: pushed down
        (-2.0, -1.0, 0.0),
        (2.0, 0.0, -2.0),
        (0.0, 1.0, 0.0),
    ],
)
def test_both_sides_of_the_clip(advantage, log_ratio, gradient, ragged):
    e = ragged(0).take(torch.tensor([0]))
    e = replace(e, advantages_B=torch.tensor([advantage]), step_tokens=1)
    where = e.mask_BS.nonzero()[0]
    mask = torch.zeros_like(e.mask_BS)
    mask[tuple(where)] = True
    e = replace(e, mask_BS=mask)
    logprobs = (e.logprobs_BS + log_ratio).requires_grad_()
    dapo(logprobs, e, clip_low=LOW, clip_high=HIGH)[0].backward()
    assert float(logprobs.grad[tuple(where)]) == pytest.approx(gradient, rel=1e-5)


def test_on_policy_the_loss_is_minus_the_token_mean_of_the_advantages(ragged):
    e = ragged(3)
    loss, metrics = dapo(e.logprobs_BS, e, clip_low=LOW, clip_high=HIGH)
    weights = e.mask_BS.sum(1).double()
    want = -float((e.advantages_B * weights).sum() / weights.sum())
    assert float(loss) == pytest.approx(want, rel=1e-5)
    assert metrics["clip_ratio/region_mean"].value() == 0
