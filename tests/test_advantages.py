"""Group-relative advantages against float64, groups without signal, missing rewards, leverage."""

from itertools import combinations

import numpy as np
import pytest
import torch

from lightning_qrl.advantages import AdvantageEstimator, highest, leverage, zero_variance

NAN = float("nan")
BASELINES, SCALES = ["mean", "leave_one_out"], ["group", "batch", "none"]


def oracle(rewards, baseline, scale):
    """Reward by reward, in float64."""
    advantages = np.zeros_like(rewards)
    spread = np.nanstd(rewards, ddof=1)
    for p, group in enumerate(rewards):
        known = group[~np.isnan(group)]
        if len(known) < 2 or known.min() == known.max():
            continue
        for g, reward in enumerate(group):
            if np.isnan(reward):
                continue
            others = np.delete(group, g)
            base = np.nanmean(group) if baseline == "mean" else np.nanmean(others)
            divisor = {"group": np.nanstd(group, ddof=1) + 1e-4, "batch": spread + 1e-4, "none": 1}
            advantages[p, g] = (reward - base) / divisor[scale]
    return advantages


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group", [2, 3, 16])
def test_float64_oracle_with_missing_rewards(baseline, scale, group):
    g = torch.Generator().manual_seed(group)
    rewards = torch.randn(20, group, generator=g)
    holes = torch.rand(20, group, generator=g) < 0.3
    rewards = rewards.masked_fill(holes, NAN)
    rewards[0], rewards[1, 1:], rewards[2, 2:] = NAN, NAN, NAN  # none known, at most 1, at most 2
    rewards[3] = 0.1
    want = oracle(rewards.double().numpy(), baseline, scale)
    got = AdvantageEstimator(baseline, scale)(rewards)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=1e-6)
    assert not got[rewards.isnan()].any()
    assert not got[:2].any()
    assert np.any(want)


def test_by_hand():
    # mean 0.5, sample std sqrt(1/2): 0.5 / (0.70710678 + 0.0001)
    advantages = AdvantageEstimator()(torch.tensor([[0.0, 1.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.7070068, 0.7070068]]))


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.5], [2.0, NAN, 4.0, NAN]])
    want = torch.tensor([[1 - 0.5 / 3, -1.5 / 3, -1.5 / 3, 0.5 - 1 / 3], [-2.0, 0.0, 2.0, 0.0]])
    got = AdvantageEstimator("leave_one_out", "none")(rewards)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group", [2, 7, 16])
def test_equal_rewards_give_exactly_zero_and_are_counted(baseline, scale, group):
    # 0.1 seven times has a mean that is not 0.1 in float32: the noise must not be amplified
    mixed = torch.arange(group, dtype=torch.float32)
    equal = [torch.full((group,), r) for r in (0.0, 1.0, -1.0, 0.1, 1 / 3, 1e6, NAN, 2.0, -2.0)]
    for rest in equal[-2:]:  # some are missing, the others equal
        rest[0] = NAN
    rewards = torch.stack([*equal, mixed])
    advantages = AdvantageEstimator(baseline, scale)(rewards)
    assert torch.equal(advantages[:-1], torch.zeros(9, group))
    assert advantages[-1, -1] > 0 > advantages[-1, 0]
    assert zero_variance(rewards).tolist() == [True] * 9 + [False]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[[NAN, NAN]], [[1.0, NAN]], [[1.0, 1.0]], [[0.3, 0.3, 0.3]]])
def test_a_batch_without_signal(scale, rewards):
    advantages = AdvantageEstimator("mean", scale)(torch.tensor(rewards))
    assert torch.equal(advantages, torch.zeros_like(advantages))


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", ["group", "none"])
def test_groups_do_not_see_each_other(baseline, scale):
    estimator = AdvantageEstimator(baseline, scale)
    rewards = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([estimator(row[None]) for row in rewards])
    assert torch.equal(estimator(rewards), alone)


def test_the_deviation_of_all_ranks_can_be_given():
    rewards = torch.tensor([[0.0, 1.0]])
    got = AdvantageEstimator("mean", "batch")(rewards, batch_std=2.0)
    torch.testing.assert_close(got, torch.tensor([[-0.5, 0.5]]) / 2.0001)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"baseline": "median"}, "baseline must be mean or leave_one_out, got 'median'"),
        ({"scale_rewards": True}, "scale_rewards must be group, batch or none, got True"),
    ],
)
def test_unknown_names(wrong, says):
    with pytest.raises(ValueError, match=says):
        AdvantageEstimator(**wrong)


# ---- leverage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", range(1, 8))
def test_the_leverage_of_right_and_wrong_completions(right):
    p = right / 8
    got = leverage(torch.tensor([[1.0] * right + [0.0] * (8 - right)]))[0]
    want = torch.tensor([(1 - p) / p] * right + [p / (1 - p)] * (8 - right))
    torch.testing.assert_close(got, want)


def test_the_mean_leverage_of_a_mixed_group_is_one_and_of_others_zero():
    rewards = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    rewards[1, :2], rewards[2], rewards[3], rewards[4, 1:] = NAN, NAN, 0.1, NAN
    got = leverage(rewards)
    mixed = [0, 1, 5]
    torch.testing.assert_close(got.nansum(1)[mixed], torch.tensor([5.0, 3.0, 5.0]))
    assert not got[[2, 3, 4]].any()
    assert not got[rewards.isnan()].any()
    known = rewards[1, 2:].double().numpy()
    want = (known - known.mean()) ** 2 / known.var()
    np.testing.assert_allclose(got[1, 2:].numpy(), want, rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 1.0])
def test_the_smallest_set_that_holds_a_share_against_every_subset(seed, share):
    values = torch.randint(0, 9, (7,), generator=torch.Generator().manual_seed(seed)).float()
    chosen = highest(values, share, at_least=0).tolist()
    needed = share * float(values.sum())
    enough = [
        size
        for size in range(8)
        if any(sum(subset) >= needed for subset in combinations(values.tolist(), size))
    ]
    assert len(chosen) == enough[0]
    assert sum(values[chosen].tolist()) >= needed
    assert chosen == sorted(set(chosen))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_has_no_leverage_is_not_chosen(share):
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        values = torch.rand(301, generator=g) * 10 ** torch.randint(-6, 3, (301,), generator=g)
        values[::3] = 0.0
        assert values[highest(values, share, at_least=1)].min() > 0


def test_at_least_so_many_are_chosen_the_highest_first():
    values = torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0])
    assert highest(values, 0.5, at_least=1).tolist() == [1]
    assert highest(values, 0.5, at_least=3).tolist() == [1, 2, 4]
    assert highest(values, 1.0, at_least=4).tolist() == [0, 1, 2, 4]
    assert highest(torch.zeros(4), 0.9, at_least=2).tolist() == [0, 1]


def test_small_differences_between_large_rewards_are_kept():
    rewards = torch.tensor([[1e7 + 1, 1e7, 1e7, 1e7]])
    got = AdvantageEstimator()(rewards)
    torch.testing.assert_close(got, torch.tensor([[1.5, -0.5, -0.5, -0.5]]), rtol=1e-3, atol=0)


def test_rewards_whose_squares_are_beyond_fp32():
    rewards = torch.tensor([[1e30, 0.0]])
    assert AdvantageEstimator()(rewards)[0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert leverage(rewards).tolist() == [[1.0, 1.0]]
