"""Token log-probabilities and entropy against float64."""

import os
import subprocess
import sys

import pytest
import torch

from lightning_qrl import logprobs
from lightning_qrl.logprobs import head_logprobs, token_logprobs


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


# ---- with a head, chunk by chunk -----------------------------------------------------------------

N, HIDDEN, VOCABULARY = 37, 16, 50


def through_a_head(chunk, monkeypatch, kept=False, grad=True):
    """Log-probabilities, entropy, and the gradients of the hidden states and of the head."""
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    g = torch.Generator().manual_seed(1)
    hidden_NH = torch.randn(N, HIDDEN, generator=g).requires_grad_(grad)
    weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=g).requires_grad_(grad)
    targets_N = torch.randint(VOCABULARY, (N,), generator=g)
    kept_NK = None
    if kept:  # six tokens each, the target among them; of some, fewer
        others_NK = (targets_N[:, None] + 7 * torch.arange(1, 6)) % VOCABULARY
        others_NK[::3, 3:] = -1
        kept_NK = torch.cat([targets_N[:, None], others_NK], dim=1)
    values, entropy, *_ = head_logprobs(
        hidden_NH, lambda rows: rows @ weight_VH.T, VOCABULARY, targets_N, 0.7, kept_NK
    )
    if grad:
        (values * torch.linspace(-1, 2, N)).sum().backward()
    return values.detach(), entropy, hidden_NH.grad, weight_VH.grad


@pytest.mark.parametrize("kept", [False, True], ids=["all", "truncated"])
@pytest.mark.parametrize("chunk", [1, VOCABULARY, 5 * VOCABULARY + 3, N * VOCABULARY - 1])
def test_a_head_in_chunks_gives_what_it_gives_at_once(chunk, kept, monkeypatch):
    """To FP32 rounding: the head's own sums may be ordered by the number of its rows."""
    whole = through_a_head(10**9, monkeypatch, kept)
    parts = through_a_head(chunk, monkeypatch, kept)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept", [False, True], ids=["all", "truncated"])
def test_a_head_against_float64(kept, monkeypatch):
    values, entropy, hidden_grad, weight_grad = through_a_head(3 * VOCABULARY, monkeypatch, kept)
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, HIDDEN, generator=g).double().requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g).double().requires_grad_()
    targets = torch.randint(VOCABULARY, (N,), generator=g)
    scores = hidden @ weight.T / 0.7
    if kept:
        allowed = torch.zeros(N, VOCABULARY, dtype=torch.bool)
        for n, target in enumerate(targets.tolist()):
            others = [(target + 7 * i) % VOCABULARY for i in range(1, 6)]
            allowed[n, [target, *others[: 3 if n % 3 == 0 else 5]]] = True
        scores = scores.masked_fill(~allowed, -torch.inf)
    want = scores.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    (want * torch.linspace(-1, 2, N)).sum().backward()
    exact = {"rtol": 1e-5, "atol": 2e-5}
    torch.testing.assert_close(values.double(), want.detach(), **exact)
    torch.testing.assert_close(
        entropy.double(), torch.special.entr(scores.detach().softmax(-1)).sum(-1), **exact
    )
    torch.testing.assert_close(hidden_grad.double(), hidden.grad, **exact)
    torch.testing.assert_close(weight_grad.double(), weight.grad, **exact)


def test_only_one_chunk_of_logits_exists_and_the_gradient_computes_it_again(monkeypatch):
    sizes = []
    monkeypatch.setattr(logprobs, "CHUNK", 10 * VOCABULARY)
    hidden_NH = torch.randn(N, HIDDEN, requires_grad=True)
    weight_VH = torch.randn(VOCABULARY, HIDDEN)

    def head(rows):
        sizes.append(len(rows))
        return rows @ weight_VH.T

    targets_N = torch.zeros(N, dtype=torch.int64)
    values, _, *_ = head_logprobs(hidden_NH, head, VOCABULARY, targets_N)
    assert sizes == [10, 10, 10, 7]
    values.sum().backward()
    assert sorted(sizes[4:]) == [7, 10, 10, 10]
    with torch.no_grad():
        head_logprobs(hidden_NH, head, VOCABULARY, targets_N)
    assert len(sizes) == 12


def test_no_tokens_at_all():
    hidden_NH = torch.randn(0, HIDDEN, requires_grad=True)
    weight_VH = torch.randn(VOCABULARY, HIDDEN)
    nothing = torch.zeros(0, dtype=torch.int64)
    values, entropy, *_ = head_logprobs(hidden_NH, lambda x: x @ weight_VH.T, VOCABULARY, nothing)
    assert values.shape == entropy.shape == (0,)
    values.sum().backward()
    assert hidden_NH.grad.shape == (0, HIDDEN)


PEAK = """
import resource, sys
import torch
from lightning_qrl import logprobs

tokens, vocabulary, chunk = map(int, sys.argv[1:])
logprobs.CHUNK = chunk or logprobs.CHUNK
torch.manual_seed(0)
hidden = torch.randn(tokens, 64, requires_grad=True)
weight = (torch.randn(vocabulary, 64) / 8).requires_grad_()
targets = torch.randint(vocabulary, (tokens,))
weight.grad = torch.zeros_like(weight)  # it is there whatever the pass needs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
values, _, *_ = logprobs.head_logprobs(hidden, lambda x: x @ weight.T, vocabulary, targets)
(-values.mean()).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def peak_growth(tokens, vocabulary, chunk=0):
    """MiB that a pass with its gradient adds to the peak memory of a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", PEAK, *map(str, (tokens, vocabulary, chunk))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


@pytest.mark.slow
def test_peak_memory_depends_on_neither_tokens_nor_vocabulary():
    mib = 50_000 * 4 / 2**20  # of one token's logits
    chunked = {(n, v): peak_growth(n, v) for n, v in ((1024, 50_000), (4096, 50_000))}
    chunked[4096, 25_000] = peak_growth(4096, 25_000)
    whole = {n: peak_growth(n, 50_000, chunk=10**12) for n in (1024, 4096)}
    print(f"\nMiB: chunked {chunked}, at once {whole}; logits of 4096 tokens {4096 * mib:.0f}")
    assert whole[4096] - whole[1024] > 3072 * mib  # the unchunked pass grows
    assert chunked[4096, 50_000] - chunked[1024, 50_000] < 0.1 * 3072 * mib
    assert chunked[4096, 50_000] < 0.6 * 4096 * mib
    assert abs(chunked[4096, 50_000] - chunked[4096, 25_000]) < 0.1 * 4096 * mib
