"""What every policy loss must do; a new file in `lightning_qrl.losses` is tested here by itself."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_qrl.experience import split_for_updates
from lightning_qrl.kl import KLPenalty
from lightning_qrl.losses.base import Loss
from lightning_qrl.plugins import load_plugin, plugin_names

PACKAGE = "lightning_qrl.losses"
every_loss = pytest.mark.parametrize("name", plugin_names(PACKAGE))


def load(name):
    return load_plugin(PACKAGE, name)()


def penalized(loss, logprobs, e, kl_coef):
    """The loss with a KL penalty that is averaged as it is."""
    kl_BS = KLPenalty(kl_coef).per_token(logprobs, e.reference_BS, e.mask_BS)
    return loss(logprobs, e)[0] + kl_coef * loss.reduce(kl_BS, e)


def accumulated(loss, logprobs, e, index, parts, kl_coef):
    """The gradient that a trainer accumulates over the micro-batches of one optimizer step."""
    logprobs.grad = None
    batches = split_for_updates(e, [index], parts)
    for batch, rows in zip(batches, index.tensor_split(parts), strict=True):
        mine = logprobs[rows][:, : batch.mask_BS.shape[1]]
        (penalized(loss, mine, batch, kl_coef) * batch.step.scale / parts).backward()
    return logprobs.grad.clone()


def test_there_are_the_losses_that_people_know():
    known = "bnpo cispo dapo distill dr_grpo grpo gspo gspo_token reinforce sapo"
    assert set(known.split()) <= set(plugin_names(PACKAGE))
    assert all(isinstance(load(name), Loss) for name in plugin_names(PACKAGE))


@every_loss
def test_what_is_masked_changes_nothing_and_gets_exactly_no_gradient(name, off_policy):
    loss = load(name)
    for seed in range(3):
        logprobs, e = off_policy(seed)
        value, metrics = loss(logprobs, e)
        value.backward()
        assert not logprobs.grad[~e.mask_BS].any()
        assert logprobs.grad[e.mask_BS].any()
        for fill in (-1e4, torch.nan):
            junk = logprobs.detach().masked_fill(~e.mask_BS, fill).requires_grad_()
            stale = replace(
                e,
                logprobs_BS=e.logprobs_BS.masked_fill(~e.mask_BS, -fill / 2),
                reference_BS=e.reference_BS.masked_fill(~e.mask_BS, fill / 3),
            )
            again, same = loss(junk, stale)
            again.backward()
            assert float(again.detach()) == float(value.detach())
            assert torch.equal(junk.grad, logprobs.grad)
            assert same == metrics


@every_loss
def test_the_average_weighs_the_tokens_of_the_mask_alone(name, off_policy):
    _, e = off_policy(0)
    values_BS = torch.zeros(e.mask_BS.shape, requires_grad=True)
    load(name).reduce(values_BS, e).backward()
    assert (values_BS.grad[e.mask_BS] > 0).all()
    assert not values_BS.grad[~e.mask_BS].any()


@every_loss
def test_masked_truncated_completions_are_in_neither_numerator_nor_denominator(name, off_policy):
    loss = load(name)
    logprobs, e = off_policy(1)
    kept = (~e.truncated_B).nonzero()[:, 0]
    assert 0 < len(kept) < len(e)
    alone = e.take(kept)
    few = logprobs.detach()[kept][:, : alone.mask_BS.shape[1]].requires_grad_()
    value, metrics = loss(logprobs, e.where(~e.truncated_B))
    want, same = loss(few, alone)
    value.backward()
    want.backward()
    assert float(value.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    assert not logprobs.grad[e.truncated_B].any()
    gradient = logprobs.grad[kept][:, : few.shape[1]]
    torch.testing.assert_close(gradient, few.grad, rtol=1e-6, atol=0)
    assert {k: m.value() for k, m in metrics.items()} == pytest.approx(
        {k: m.value() for k, m in same.items()}
    )


@every_loss
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_micro_batches_change_no_gradient(name, kl_coef, off_policy):
    loss = load(name)
    for seed in range(2):
        logprobs, e = off_policy(seed)
        index = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        logprobs.grad = None
        penalized(loss, logprobs, e, kl_coef).backward()
        whole = logprobs.grad.clone()
        assert whole.any()
        for parts in (1, 2, 4, 8):  # 8: one completion each, one of them without a token
            split = accumulated(loss, logprobs, e, index, parts, kl_coef)
            torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-8)


def all_equal(e):
    """No completion is better than another, and the teacher agrees with the sampler."""
    return replace(e, advantages_B=torch.zeros(len(e)), reference_BS=e.logprobs_BS)


WITHOUT_SIGNAL = {
    "all equal": all_equal,
    "all masked": lambda e: e.where(torch.zeros(len(e), dtype=torch.bool)),
    "no completions": lambda e: e.take(torch.tensor([], dtype=torch.int64)),
    "no completion with a token": lambda e: e.take(torch.tensor([4])),
}


@every_loss
@pytest.mark.parametrize("batch", WITHOUT_SIGNAL.values(), ids=WITHOUT_SIGNAL.keys())
def test_a_batch_without_signal_gives_zero(name, batch, off_policy):
    loss = load(name)
    logprobs, e = off_policy(0)
    e = batch(e)
    logprobs = logprobs.detach()[: len(e), : e.mask_BS.shape[1]].requires_grad_()
    value, metrics = loss(logprobs, e)
    value.backward()
    assert float(value.detach()) == 0.0
    assert torch.equal(logprobs.grad, torch.zeros_like(logprobs))
    assert all(math.isfinite(metric.value()) for metric in metrics.values())


@every_loss
def test_on_policy_every_importance_ratio_is_one_and_nothing_is_clipped(name, off_policy):
    logprobs, e = off_policy(2, spread=0.0)
    _, metrics = load(name)(logprobs, e)
    for key, metric in metrics.items():
        if key.startswith("importance_ratio/"):
            assert metric.value() == 1.0
        elif "clip" in key:
            assert metric.value() == 0.0
