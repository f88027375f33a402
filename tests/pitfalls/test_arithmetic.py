"""Advantages, losses and their metrics: faults that users met elsewhere, each right here.

The numbers are those of the list that the tests follow; each docstring links to the report. 5, 8,
13 and 18 are no rows of it; `test_ratios` has 7, 9 to 11, 17, 21 and 22.
"""

import math
from pathlib import Path

import pytest
import torch
from grpo_parts import G, P, completion, data_of, experience_of, module_of
from tiny_models import tiny_model

import lightning_qrl
from lightning_qrl.advantages import AdvantageEstimator
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.experience import split_for_updates
from lightning_qrl.groups import Groups
from lightning_qrl.kl import ESTIMATORS, KLPenalty
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.losses.grpo import Grpo
from lightning_qrl.losses.gspo import Gspo
from lightning_qrl.overlong import Overlong
from lightning_qrl.recipe import load_recipe
from lightning_qrl.reports.live import Progress
from lightning_qrl.scoring import Scorer


def test_row_01_a_group_of_equal_rewards_gives_zero_and_is_counted():
    """https://github.com/huggingface/trl/issues/3857 ; rewards vary, but not within a group."""
    rewards_PG = torch.tensor([[0.1], [0.7], [1 / 3]]).expand(3, 7)  # whose mean rounds
    for baseline in ("mean", "leave_one_out"):
        for scale in ("group", "batch", "none"):
            advantages_PG = AdvantageEstimator(baseline, scale)(rewards_PG)
            assert torch.equal(advantages_PG, torch.zeros(3, 7))
    groups = Groups(tuple(completion([4, 1]) for _ in range(21)), rewards_PG)
    assert groups.metrics()["frac_reward_zero_std"].value() == 1.0
    assert groups.metrics()["reward_std"].value() > 0.2


@pytest.mark.parametrize("missing", [None, math.nan])
def test_row_02_a_missing_reward_is_out_of_the_baseline_and_counted(
    missing, tiny_policy, parity, fit, recorder
):
    """https://github.com/huggingface/trl/pull/5775 ; neither 0 nor NaN for the whole batch."""
    judged = iter(range(10**6))
    parity.reward = lambda prompt, text: (missing, 1.0, 0.0, 1.0)[next(judged) % 4]
    module = module_of(tiny_policy, parity)
    fit(module, data_of(parity), 1, logger=recorder)
    (step,), advantages_PG = recorder.steps, module.rollouts[0].advantages_B.view(P, G)
    std = math.sqrt(1 / 3) + 1e-4  # of 1, 0, 1
    want = torch.tensor([0.0, 1 / 3 / std, -2 / 3 / std, 1 / 3 / std])
    torch.testing.assert_close(advantages_PG, want.expand(P, G))
    assert step["train/rewards_missing"] == P
    assert step["train/reward"] == pytest.approx(2 / 3)
    assert 0 < step["train/grad_norm"] < math.inf


def test_row_03_a_group_of_one_is_refused_and_ragged_groups_agree_with_a_loop():
    """https://github.com/verl-project/verl/pull/7581 ; one completion has nothing to beat."""
    with pytest.raises(UserError, match="command line: grpo: group_size must be at least 2"):
        build(load_recipe("base", ["grpo.group_size=1"]))
    g, nan = torch.Generator().manual_seed(0), math.nan
    rewards_PG = torch.rand(5, 6, generator=g, dtype=torch.float64)
    for row, known in enumerate((6, 4, 2, 1, 0)):
        rewards_PG[row, known:] = nan
    got_PG = AdvantageEstimator()(rewards_PG)
    for row, known in enumerate((6, 4, 2, 1, 0)):
        group = rewards_PG[row, :known]
        want = torch.zeros(6, dtype=torch.float64)
        if known > 1:
            want[:known] = (group - group.mean()) / (group.std() + 1e-4)
        torch.testing.assert_close(got_PG[row], want)


def test_row_04_micro_batches_change_no_gradient(ragged):
    """https://github.com/huggingface/trl/issues/5619 ; the loss's scale follows no accumulation."""
    model = tiny_model("llama", vocab_size=17)
    e, index, gradients = ragged(5), torch.arange(8), []
    scorer = Scorer(model, shared_prefix=True)
    for k in (1, 2, 4):
        model.zero_grad()
        for part in split_for_updates(e, [index], k):
            logprobs_BS, _, *_ = scorer(part, 1.0)
            (Dapo()(logprobs_BS, part)[0] * part.step.scale / k).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert gradients[0].norm() > 1e-2
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() < 1e-5 * gradients[0].norm()


@pytest.mark.parametrize("loss", [Dapo(), Grpo()])
def test_row_06_truncated_completions_are_in_neither_numerator_nor_denominator(loss):
    """https://github.com/huggingface/trl/issues/6369 ; all masked gives 0, not 0/0."""
    both = experience_of(
        [completion([4, 5, 1]), completion([6, 7, 8, 9], truncated=True)], [1.0, -2.0]
    )
    masked, alone = both.where(~both.truncated_B), both.take(torch.tensor([0]))
    values = []
    for e in (masked, alone):
        zeros = torch.zeros(e.mask_BS.shape, requires_grad=True)
        value, _ = loss(zeros, e)
        value.backward()
        values.append((float(value.detach()), zeros.grad[0, e.mask_BS[0]].tolist()))
    assert values[0] == values[1] == (-1.0, [pytest.approx(-1 / 3)] * 3)
    none = both.where(torch.tensor([False, False]))
    assert float(loss(torch.zeros(none.mask_BS.shape), none)[0]) == 0.0


def test_row_12_a_sequence_ratio_does_not_explode_with_the_length():
    """https://github.com/huggingface/trl/issues/5814 ; `gspo` is the geometric mean, and says so.

    The product of the ratios is an importance weight, not a loss: it belongs to the corrections of
    the sampler's bias, with its effective sample size, and is not there yet.
    """
    for length in (1, 10, 1000):
        e = experience_of([completion([4] * length)], [1.0])
        _, metrics = Gspo()(e.logprobs_BS + 0.2 * e.mask_BS, e)
        assert metrics["importance_ratio/mean"].value() == pytest.approx(math.exp(0.2), rel=1e-5)
    assert "geometric mean" in (Path(lightning_qrl.__file__).parent / "losses/gspo.py").read_text()


def test_row_14_ratios_are_logged_before_and_after_clipping():
    """https://github.com/huggingface/trl/issues/5231 ; raw and clipped, and how many differ."""
    e = experience_of([completion([4, 5, 6]), completion([4, 5])], [1.0, -1.0])
    shift = torch.tensor([[0, math.log(2), 0, math.log(0.5)], [0, 0, math.log(0.5), 0]])
    _, metrics = Dapo()(e.logprobs_BS + shift, e)
    values = {name: metric.value() for name, metric in metrics.items()}
    raw = [values[f"importance_ratio/{end}"] for end in ("min", "mean", "max")]
    clipped = [values[f"importance_ratio/clipped_{end}"] for end in ("min", "mean", "max")]
    assert raw == pytest.approx([0.5, (2 + 1 + 0.5 + 1 + 0.5) / 5, 2.0])
    assert clipped == pytest.approx([0.5, (1.28 + 1 + 0.5 + 1 + 0.8) / 5, 1.28])
    assert values["clip_ratio/region_mean"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_row_15_the_gradient_of_the_kl_flows_through_the_policy_alone(name):
    """https://github.com/NVIDIA-NeMo/RL/pull/2506 ; and k3 is never negative."""
    g = torch.Generator().manual_seed(0)
    policy_BS = torch.randn(4, 9, generator=g).requires_grad_()
    reference_BS = torch.randn(4, 9, generator=g).requires_grad_()
    mask_BS = torch.ones(4, 9, dtype=torch.bool)
    kl_BS = KLPenalty(0.1, name).per_token(policy_BS, reference_BS, mask_BS)
    kl_BS.sum().backward()
    assert reference_BS.grad is None
    d = (policy_BS - reference_BS).detach().double()
    want = {"k1": d, "k2": d, "k3": 1 - torch.exp(-d)}[name]
    torch.testing.assert_close(policy_BS.grad.double(), want, rtol=1e-5, atol=1e-6)
    assert name == "k1" or kl_BS.min() >= 0


def test_row_16_on_policy_the_loss_is_near_zero_and_the_gradient_is_not(
    tiny_policy, parity, fit, recorder
):
    """https://github.com/huggingface/open-r1/issues/239 ; right, and the documentation says so."""
    fit(module_of(tiny_policy, parity, loss=Grpo()), data_of(parity), 1, logger=recorder)
    (step,) = recorder.steps
    assert abs(step["train/loss"]) < 1e-5
    assert step["train/grad_norm"] > 1e-2
    docs = Path(lightning_qrl.__file__).parents[1] / "docs"
    if docs.is_dir():  # not part of an installed package
        assert "A loss near 0 with a `train/grad_norm`" in (docs / "metrics.md").read_text()
    shown = dict(Progress("x", 1, 2, None, [0.5], step).shown())
    assert {"grad norm", "loss"} <= shown.keys()


def test_row_19_groups_without_signal_are_counted_and_explained():
    """https://github.com/jsboige/CoursIA/issues/10603 ; two completions at a solve rate of 0.18."""
    g = torch.Generator().manual_seed(0)
    rewards_PG = (torch.rand(4000, 2, generator=g) < 0.18).float()
    groups = Groups(tuple(completion([4]) for _ in range(8000)), rewards_PG)
    dead = groups.metrics()["frac_reward_zero_std"]
    assert dead.value() == pytest.approx(0.18**2 + 0.82**2, abs=0.02)
    said = Progress("x", 1, 2, None, [], {"train/frac_reward_zero_std": 0.9}).explained()
    assert "grpo.group_size" in said["train/frac_reward_zero_std"]


def test_row_20_what_advantages_are_divided_by_stands_in_the_recipe():
    """https://github.com/NovaSky-AI/SkyRL/issues/869 ; a line to see and to change."""
    assert load_recipe("base").values["grpo"]["scale_rewards"] == "group"
    rewards_PG = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    plain = build(load_recipe("base", ["grpo.scale_rewards=none"])).module.advantages
    assert plain(rewards_PG).tolist() == [[-0.5, 0.5, 0.5, -0.5]]


def test_masking_truncated_completions_keeps_their_rewards_in_the_baseline(
    tiny_policy, parity, fit
):
    """The other half of row 06: the advantages are those of the full group."""
    rollouts = []
    for masking in (False, True):
        module = module_of(
            tiny_policy, parity, overlong=Overlong(mask_truncated_completions=masking)
        )
        fit(module, data_of(parity), 1)
        rollouts += module.rollouts
    plain, masked = rollouts
    assert torch.equal(plain.advantages_B, masked.advantages_B)
    assert not masked.mask_BS[masked.truncated_B].any()
    assert masked.truncated_B.any()
    assert torch.equal(masked.mask_BS[~masked.truncated_B], plain.mask_BS[~plain.truncated_B])
