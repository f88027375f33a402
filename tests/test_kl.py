"""The KL estimators: values, what their gradients estimate, and what they leave alone."""

import math

import pytest
import torch

from lightning_qrl.kl import ESTIMATORS, KLPenalty

VALUES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_values(name):
    d = [-3.0, -1.0, -0.01, 0.0, 0.02, 0.5, 4.0]
    got = ESTIMATORS[name](torch.tensor(d, dtype=torch.float64))
    assert got.tolist() == pytest.approx([VALUES[name](x) for x in d], rel=1e-12, abs=1e-15)
    if name != "k1":
        assert got.min() >= 0


def test_k3_keeps_its_digits_near_zero_and_is_never_negative():
    d = torch.logspace(-7, 1, 1000)
    for sign in (1, -1):
        assert ESTIMATORS["k3"](sign * d).min() >= 0
    torch.testing.assert_close(ESTIMATORS["k3"](torch.tensor(1e-3)).item(), 5e-7, rtol=1e-2, atol=0)


def policies(actions=6):
    g = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, actions, generator=g, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(-1)


def divergence(p, q):
    """KL(p || q) of two distributions from their log-probabilities."""
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize(
    ("name", "estimated"),
    [
        ("k1", lambda pi, ref: divergence(pi, ref)),
        ("k2", lambda pi, ref: divergence(pi, ref)),
        ("k3", lambda pi, ref: divergence(ref, pi)),
    ],
)
def test_the_expected_gradient_on_the_policys_own_samples(name, estimated):
    logits, reference = policies()
    pi = logits.log_softmax(-1)
    mask = torch.ones(1, len(pi), dtype=torch.bool)
    penalty = KLPenalty(1.0, name).per_token(pi[None], reference[None], mask)[0]
    (expected,) = torch.autograd.grad((pi.detach().exp() * penalty).sum(), logits)
    (want,) = torch.autograd.grad(estimated(logits.log_softmax(-1), reference), logits)
    torch.testing.assert_close(expected, want)
    assert want.abs().max() > 1e-2


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_expected_value_is_the_reverse_kl(name):
    logits, reference = policies()
    pi = logits.detach().log_softmax(-1)
    value = (pi.exp() * ESTIMATORS[name](pi - reference)).sum()
    torch.testing.assert_close(value, divergence(pi, reference))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_gradient_goes_through_the_policy_alone_and_not_outside_the_mask(name):
    g = torch.Generator().manual_seed(1)
    logprobs, reference = torch.randn(2, 3, 4, generator=g)
    logprobs.requires_grad_()
    reference.requires_grad_()
    mask = torch.rand(3, 4, generator=g) < 0.6
    junk = logprobs.masked_fill(~mask, torch.nan), reference.masked_fill(~mask, torch.inf)
    got = KLPenalty(0.5, name).per_token(*junk, mask)
    got.sum().backward()
    assert reference.grad is None
    assert logprobs.grad[mask].all()
    assert not logprobs.grad[~mask].any()
    assert not got[~mask].any()
    want = [VALUES[name](float(d)) for d in (logprobs - reference).detach()[mask].double()]
    assert got[mask].tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("coef", [-0.1, math.inf, math.nan])
def test_a_weight_out_of_range(coef):
    with pytest.raises(ValueError, match="kl_coef must be at least 0 and finite, got"):
        KLPenalty(coef)


def test_an_unknown_estimator():
    with pytest.raises(ValueError, match="kl_estimator must be k1, k2 or k3, got 'k4'"):
        KLPenalty(0.1, "k4")
