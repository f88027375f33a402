"""Groups of completions: taking, joining, and what is said about them, against numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_qrl.experience import Completion
from lightning_qrl.groups import Groups

NAN = float("nan")


def completion(prompt, length, truncated):
    ids = torch.arange(length)
    return Completion((prompt,), ids, -ids.float(), torch.zeros_like(ids), truncated)


def make(rewards, lengths=None, truncated=None):
    """Groups whose prompts are numbered."""
    rewards_PG = torch.tensor(rewards)
    prompts, group = rewards_PG.shape
    lengths = lengths or [[1] * group] * prompts
    truncated = truncated or [[False] * group] * prompts
    rows = [
        completion(p, lengths[p][g], truncated[p][g]) for p in range(prompts) for g in range(group)
    ]
    return Groups(tuple(rows), rewards_PG)


def prompts(groups):
    """The prompt of each group, all of whose completions stand side by side."""
    each = groups.rewards_PG.shape[1]
    ids = [c.prompt_ids[0] for c in groups.completions]
    assert ids == [p for p in ids[::each] for _ in range(each)]
    return ids[::each]


def test_taking_and_joining_keep_completions_with_their_rewards():
    groups = make([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    taken = groups.take([2, 0])
    assert prompts(taken) == [2, 0]
    assert taken.rewards_PG.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    joined = taken + groups
    assert len(joined) == 5
    assert prompts(joined) == [2, 0, 0, 1, 2]
    assert joined.rewards_PG[2:].tolist() == groups.rewards_PG.tolist()
    assert len(groups.take([])) == 0


@pytest.mark.parametrize(
    ("count", "chosen"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])]
)
def test_mixed_groups_come_first_and_others_only_where_these_are_too_few(count, chosen):
    groups = make([[1.0, 1.0], [0.0, 1.0], [NAN, 1.0], [1.0, 0.0], [NAN, NAN]])
    assert prompts(groups.mixed_first(count)) == chosen


def test_metrics_against_numpy():
    rewards = [[0.0, 1.0, NAN], [0.5, 0.5, 0.5], [0.25, NAN, NAN], [1.0, 0.0, 0.0]]
    lengths = [[3, 4, 5], [7, 7, 1], [2, 7, 6], [4, 4, 3]]
    truncated = [[False] * 3, [True, True, False], [False, True, False], [False] * 3]
    groups = make(rewards, lengths, truncated)
    assert groups.lengths().tolist() == lengths
    every, ended = np.array(lengths), np.array(lengths)[~np.array(truncated)]
    within = sum(np.nansum((np.array(g) - np.nanmean(g)) ** 2) for g in rewards)
    want = {
        "reward_variance_within": within / np.isfinite(rewards).sum(),
        "reward": np.nanmean(rewards),
        "reward_std": np.nanstd(rewards, ddof=1),
        "rewards_missing": 3,
        "frac_reward_zero_std": 0.5,
        "completions/mean_length": every.mean(),
        "completions/min_length": 1,
        "completions/max_length": 7,
        "completions/mean_terminated_length": ended.mean(),
        "completions/min_terminated_length": ended.min(),
        "completions/max_terminated_length": ended.max(),
        "completions/clipped_ratio": 3 / 12,
    }
    got = {name: metric.value() for name, metric in groups.metrics().items()}
    assert got == pytest.approx(want)


def test_groups_that_know_nothing_give_finite_metrics():
    groups = make([[NAN, NAN]], truncated=[[True, True]])
    values = {name: metric.value() for name, metric in groups.metrics().items()}
    assert values["reward"] == values["reward_std"] == values["reward_variance_within"] == 0.0
    assert values["rewards_missing"] == 2
    assert values["completions/mean_terminated_length"] == 0.0
    assert values["completions/clipped_ratio"] == 1.0


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_metrics_of_parts_merge_into_those_of_the_whole(cut):
    whole = make([[0.1, 1.0], [NAN, 3.0], [0.5, 0.5], [-2.0, 0.25]])
    first, second = whole.take(range(cut)).metrics(), whole.take(range(cut, 4)).metrics()
    merged = {name: metric.merge(second[name]).value() for name, metric in first.items()}
    assert merged == pytest.approx({k: metric.value() for k, metric in whole.metrics().items()})


def test_penalties_decide_which_groups_carry_a_signal():
    groups = replace(
        make([[0.0, 0.0], [1.0, 0.0]]), penalties_PG=torch.tensor([[0.0, -0.5], [-1.0, 0.0]])
    )
    assert groups.unmixed_P.tolist() == [False, True]  # the second: 1 - 1 and 0 + 0
    assert groups.mixed_first(1).rewards_PG.tolist() == [[0.0, 0.0]]
    metrics = {name: metric.value() for name, metric in groups.metrics().items()}
    assert metrics["reward"] == 0.25  # as the task gave them
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["length_penalty"] == -0.375
    together = groups + groups.take([1])
    assert together.shaped_PG.tolist() == [[0.0, -0.5], [0.0, 0.0], [0.0, 0.0]]
