"""What every policy loss must do; a new file in `lightning_qrl.losses` is tested here by itself."""

from dataclasses import replace

import pytest
import torch

from lightning_qrl.experience import split_for_updates
from lightning_qrl.plugins import load_plugin, plugin_names

PACKAGE = "lightning_qrl.losses"
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
every_loss = pytest.mark.parametrize("name", plugin_names(PACKAGE))


def policy_logprobs(experience, seed=0):
    g = torch.Generator().manual_seed(seed)
    noise = 0.5 * torch.randn(experience.mask_BS.shape, generator=g)
    return (experience.logprobs_BS + noise).requires_grad_()


def gradient(name, logprobs, experience, index, parts):
    """What Lightning accumulates over the micro-batches of one optimizer step."""
    logprobs.grad = None
    batches = split_for_updates(experience, [index], parts)
    for batch, rows in zip(batches, index.chunk(parts), strict=True):
        mine = logprobs[rows][:, : batch.mask_BS.shape[1]]
        loss, _ = load_plugin(PACKAGE, name)(mine, batch, **CLIP)
        (loss * batch.loss_scale / parts).backward()
    return logprobs.grad.clone()


def test_there_is_a_loss():
    assert "dapo" in plugin_names(PACKAGE)


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_what_is_masked_changes_nothing_and_gets_exactly_no_gradient(name, seed, ragged):
    e = ragged(seed)
    loss = load_plugin(PACKAGE, name)
    logprobs = policy_logprobs(e)
    value, metrics = loss(logprobs, e, **CLIP)
    value.backward()
    assert torch.equal(logprobs.grad[~e.mask_BS], torch.zeros(int((~e.mask_BS).sum())))
    assert logprobs.grad[e.mask_BS].any()
    junk = logprobs.detach().masked_fill(~e.mask_BS, -1e4)
    stale = replace(e, logprobs_BS=e.logprobs_BS.masked_fill(~e.mask_BS, 50.0))
    again, same = loss(junk, stale, **CLIP)
    assert float(again) == float(value.detach())
    assert same == metrics


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_change_no_gradient(name, seed, ragged):
    e = ragged(seed)
    index = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    logprobs = policy_logprobs(e, seed)
    whole = gradient(name, logprobs, e, index, 1)
    assert whole.any()
    for parts in (2, 4, 8):  # 8: one completion each, one of them without a token
        split = gradient(name, logprobs, e, index, parts)
        torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-8)


@every_loss
def test_a_batch_without_signal_gives_zero(name, ragged):
    e = ragged(0)
    loss = load_plugin(PACKAGE, name)
    equal = replace(e, advantages_B=torch.zeros(8))
    all_masked = replace(e, mask_BS=torch.zeros_like(e.mask_BS), step_tokens=0)
    for batch in (equal, all_masked):
        logprobs = policy_logprobs(batch)
        value, metrics = loss(logprobs, batch, **CLIP)
        value.backward()
        assert float(value.detach()) == 0.0
        assert torch.equal(logprobs.grad, torch.zeros_like(logprobs))
        assert all(torch.isfinite(torch.tensor(m.value())) for m in metrics.values())
