"""Group-relative advantages against float64, and groups without signal."""

import numpy as np
import pytest
import torch

from lightning_qrl.advantages import group_normalized, zero_variance


def oracle(rewards: np.ndarray) -> np.ndarray:
    mean = rewards.mean(axis=1, keepdims=True)
    return (rewards - mean) / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)


@pytest.mark.parametrize("group", [2, 3, 16])
def test_float64_oracle(group):
    rewards = torch.randn(20, group, generator=torch.Generator().manual_seed(group))
    want = oracle(rewards.double().numpy())
    np.testing.assert_allclose(group_normalized(rewards).numpy(), want, rtol=1e-5, atol=1e-6)


def test_by_hand():
    # mean 0.5, sample std sqrt(1/2): 0.5 / (0.70710678 + 0.0001)
    advantages = group_normalized(torch.tensor([[0.0, 1.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.7070068, 0.7070068]]))


@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, 0.1, 1 / 3, 1e6])
@pytest.mark.parametrize("group", [2, 7, 16])
def test_equal_rewards_give_exactly_zero_and_are_counted(reward, group):
    # 0.1 seven times has a mean that is not 0.1 in float32: the noise must not be amplified
    mixed = torch.arange(group, dtype=torch.float32)
    rewards = torch.stack([torch.full((group,), reward), mixed])
    advantages = group_normalized(rewards)
    assert torch.equal(advantages[0], torch.zeros(group))
    assert advantages[1].abs().min() >= 0
    assert advantages[1].abs().max() > 0.5
    assert zero_variance(rewards).tolist() == [True, False]


def test_groups_do_not_see_each_other():
    rewards = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([group_normalized(row[None]) for row in rewards])
    assert torch.equal(group_normalized(rewards), alone)
