"""Token log-probabilities and entropy against float64."""

import pytest
import torch

from lightning_qrl import logprobs
from lightning_qrl.logprobs import token_logprobs


def random_logits(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    logits_BSV = (4 * torch.randn(3, 5, 11, generator=g)).to(dtype)
    return logits_BSV, torch.randint(11, (3, 5), generator=g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_float64_oracle(temperature, dtype):
    logits, targets = random_logits(dtype)
    got, entropy = token_logprobs(logits, targets, temperature)
    scaled = logits.double() / temperature
    everything = scaled - scaled.exp().sum(-1, keepdim=True).log()
    want = everything.gather(-1, targets[..., None])[..., 0]
    want_entropy = -(everything.exp() * everything).sum(-1)
    assert got.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-6, atol=2e-6)


def test_entropy_of_certainty_and_of_ignorance():
    logits = torch.tensor([[[1e4, 0.0, 0.0, 0.0], [7.0, 7.0, 7.0, 7.0]]])
    _, entropy = token_logprobs(logits, torch.zeros(1, 2, dtype=torch.long))
    torch.testing.assert_close(entropy, torch.tensor([[0.0, 4.0]]).log().nan_to_num(neginf=0.0))


@pytest.mark.parametrize("chunk", [1, 2, 7, 15, 16])
def test_chunks_change_nothing(chunk, monkeypatch):
    def run():
        logits, targets = random_logits()
        logits.requires_grad_()
        values, entropy = token_logprobs(logits, targets, 0.7)
        (values * torch.arange(15.0).view(3, 5)).sum().backward()
        return values, entropy, logits.grad

    whole = run()
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    for a, b in zip(whole, run(), strict=True):
        assert torch.equal(a, b)


def test_gradient_is_that_of_log_softmax_and_entropy_has_none():
    logits, targets = random_logits()
    logits.requires_grad_()
    values, entropy = token_logprobs(logits, targets, 1.3)
    assert not entropy.requires_grad
    values.sum().backward()
    exact = (logits.detach().double() / 1.3).softmax(-1)
    want = (torch.nn.functional.one_hot(targets, 11) - exact) / 1.3
    torch.testing.assert_close(logits.grad.double(), want, rtol=0, atol=1e-6)
