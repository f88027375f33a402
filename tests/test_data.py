"""The order of prompts, and what numbers go together."""

import pytest
import torch

from lightning_qrl.data import RolloutData
from lightning_qrl.errors import UserError
from lightning_qrl.tasks.base import Prompt

SEVEN = [Prompt(str(i)) for i in range(7)]


def phases(count, prompts=SEVEN, **options):
    data = RolloutData(prompts, **{"group_size": 2, "prompts_per_rollout": 3, **options})
    return [[p.text for p in data.phase_prompts(phase)] for phase in range(count)]


def test_each_pass_shows_every_prompt_once_in_an_order_of_its_own():
    shown = sum(phases(7), [])
    passes = [shown[:7], shown[7:14], shown[14:]]
    assert all(sorted(one) == sorted(p.text for p in SEVEN) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_a_phase_is_found_by_its_number_alone():
    data = RolloutData(SEVEN, group_size=2, prompts_per_rollout=3)
    late = [p.text for p in data.phase_prompts(6)]
    assert late == phases(7)[6]


def test_the_seed_decides_the_order():
    assert phases(3, seed=1) == phases(3, seed=1)
    assert phases(3, seed=1) != phases(3, seed=2)


def test_the_order_does_not_depend_on_the_size_of_a_phase():
    assert sum(phases(7), []) == sum(phases(3, prompts_per_rollout=7), [])


@pytest.mark.parametrize("minibatches", [1, 2, 6])
def test_every_completion_once_a_pass(minibatches):
    data = RolloutData(
        SEVEN, group_size=4, prompts_per_rollout=3, minibatches=minibatches, num_iterations=3
    )
    updates = data._updates(torch.arange(12), phase=2)
    assert len(updates) == data.updates_per_rollout == 3 * minibatches
    passes = [torch.cat(updates[i : i + minibatches]) for i in range(0, len(updates), minibatches)]
    assert all(sorted(one.tolist()) == list(range(12)) for one in passes)
    if minibatches > 1:
        assert not torch.equal(passes[0], passes[1])
        assert not torch.equal(
            passes[0], torch.cat(data._updates(torch.arange(12), 3)[:minibatches])
        )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prompts_per_rollout": 0}, "prompts_per_rollout must be at least 1"),
        ({"minibatches": 0}, "minibatches must be at least 1"),
        ({"num_iterations": 0}, "num_iterations must be at least 1"),
        ({"minibatches": 4}, "6 completions .* do not divide into minibatches=4"),
        ({"micro_batches": 4}, "accumulate_grad_batches=4"),
        ({"prompts_per_rollout": 8}, "has only 7 prompts"),
    ],
)
def test_numbers_that_do_not_go_together(wrong, says):
    with pytest.raises(ValueError, match=says):
        RolloutData(SEVEN, **{"group_size": 2, "prompts_per_rollout": 3, **wrong})


def test_ranks_need_equal_shares():
    data = RolloutData(SEVEN, group_size=2, prompts_per_rollout=6, micro_batches=4)
    data.check_ranks(1)
    with pytest.raises(UserError, match="does not give 2 ranks equal shares"):
        data.check_ranks(2)
    with pytest.raises(UserError, match="does not give 4 ranks equal shares"):
        RolloutData(SEVEN, group_size=2, prompts_per_rollout=6).check_ranks(4)
