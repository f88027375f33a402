"""Losses on a few tokens, by hand; what one loss has to do with another; what they refuse."""

from dataclasses import replace
from math import cosh, exp, inf, nan

import pytest
import torch

from lightning_qrl.losses.bnpo import Bnpo
from lightning_qrl.losses.cispo import Cispo
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.losses.distill import Distill
from lightning_qrl.losses.dr_grpo import DrGrpo
from lightning_qrl.losses.grpo import Grpo
from lightning_qrl.losses.gspo import Gspo
from lightning_qrl.losses.gspo_token import GspoToken
from lightning_qrl.losses.reinforce import Reinforce
from lightning_qrl.losses.sapo import Sapo
from lightning_qrl.metrics import Tally
from lightning_qrl.plugins import load_plugin, plugin_names

CLIPPED = [Grpo, Bnpo, DrGrpo, Dapo, Gspo, GspoToken]

# ---- one token -----------------------------------------------------------------------------------


def one_token(loss, advantage, log_ratio, batch_of):
    """Value and gradient of the loss of a batch of a single token."""
    e = batch_of([[-1.0]], [advantage], limit=1)
    logprobs = (e.logprobs_BS + log_ratio).requires_grad_()
    value, _ = loss(logprobs, e)
    value.backward()
    return float(value.detach()), float(logprobs.grad)


@pytest.mark.parametrize("loss", CLIPPED)
@pytest.mark.parametrize(
    ("advantage", "log_ratio", "value", "gradient"),
    [
        (2.0, 1.0, -2 * 1.28, 0.0),  # already likelier than the clip allows
        (2.0, -1.0, -2 * exp(-1.0), -2 * exp(-1.0)),  # good, became unlikely: pulled back
        (-2.0, 1.0, 2 * exp(1.0), 2 * exp(1.0)),  # bad, became likely: pushed down
        (-2.0, -1.0, 2 * 0.8, 0.0),
        (2.0, 0.0, -2.0, -2.0),
        (0.0, 1.0, 0.0, 0.0),
    ],
)
def test_both_sides_of_the_clip(loss, advantage, log_ratio, value, gradient, batch_of):
    got = one_token(loss(clip_low=0.2, clip_high=0.28), advantage, log_ratio, batch_of)
    assert got == pytest.approx((value, gradient), rel=1e-6)


@pytest.mark.parametrize("log_ratio", [-2.0, -0.1, 0.0, 0.3, 1.0])
@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 0.5), (-2.0, 3.0)])
def test_the_slope_of_the_soft_gate(advantage, tau, log_ratio, batch_of):
    rho = exp(log_ratio)
    gate = 1 / cosh(tau / 2 * (rho - 1)) ** 2  # in their notation 4 p (1 - p)
    _, gradient = one_token(
        Sapo(temperature_pos=0.5, temperature_neg=3.0), advantage, log_ratio, batch_of
    )
    assert gradient == pytest.approx(-advantage * rho * gate, rel=1e-5)


@pytest.mark.parametrize(("log_ratio", "weight"), [(-3.0, exp(-3.0)), (0.1, exp(0.1)), (3.0, 1.5)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_keeps_the_gradient_of_a_token_whose_weight_is_capped(
    advantage, log_ratio, weight, batch_of
):
    _, gradient = one_token(Cispo(clip_high=0.5), advantage, log_ratio, batch_of)
    assert gradient == pytest.approx(-advantage * weight, rel=1e-6)


# ---- one loss and another ------------------------------------------------------------------------


def gradient_of(loss, logprobs, e):
    logprobs.grad = None
    loss(logprobs, e)[0].backward()
    return logprobs.grad.clone()


def test_on_policy_the_clipped_losses_are_minus_the_average_advantage(off_policy):
    logprobs, e = off_policy(3, spread=0.0)
    length_B, advantages_B = e.mask_BS.sum(1).double(), e.advantages_B.double()
    some_B = length_B > 0
    completions = -float(advantages_B[some_B].mean())
    tokens = -float((advantages_B * length_B).sum() / length_B.sum())
    for loss, want in [(Grpo, completions), (Gspo, completions), (Dapo, tokens), (Bnpo, tokens)]:
        assert float(loss()(logprobs, e)[0].detach()) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("loss", CLIPPED)
def test_on_policy_a_loss_of_zero_has_a_gradient(loss, batch_of):
    e = batch_of([[-1.0, -0.5], [-2.0, -0.1]], [1.0, -1.0])
    logprobs = e.logprobs_BS.clone().requires_grad_()
    value, _ = loss()(logprobs, e)
    value.backward()
    assert float(value.detach()) == 0.0
    assert logprobs.grad.sign().tolist() == [[-1.0, -1.0], [1.0, 1.0]]


@pytest.mark.parametrize("loss", [Gspo, GspoToken])
@pytest.mark.parametrize("drift", [0.5, -0.5])
def test_the_ratio_of_a_completion_does_not_grow_with_its_length(loss, drift, batch_of):
    e = batch_of([[-2.0] * 500, [-2.0]], [0.0, 0.0])
    _, metrics = loss()(e.logprobs_BS + drift, e)
    for bound in ("min", "max"):
        assert metrics[f"importance_ratio/{bound}"].value() == pytest.approx(exp(drift))


def test_on_policy_losses_that_differ_in_their_weights_alone_share_gradients(off_policy):
    for seed in range(3):
        logprobs, e = off_policy(seed, spread=0.0)
        constant = gradient_of(DrGrpo(), logprobs, e) * e.max_new_tokens
        pairs = [
            (gradient_of(Gspo(), logprobs, e), gradient_of(Grpo(), logprobs, e)),
            (gradient_of(Sapo(), logprobs, e), gradient_of(Grpo(), logprobs, e)),
            (gradient_of(Cispo(), logprobs, e), gradient_of(Dapo(), logprobs, e)),
            (gradient_of(Reinforce(), logprobs, e), constant),
        ]
        for one, other in pairs:
            assert one.any()
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("clip", [{}, {"clip_low": 0.2, "clip_high": 0.2}])
def test_gspo_token_is_gspo_where_all_tokens_share_an_advantage(clip, off_policy):
    for seed in range(3):
        logprobs, e = off_policy(seed)
        value, same = (loss(**clip)(logprobs, e)[0].detach() for loss in (Gspo, GspoToken))
        torch.testing.assert_close(same, value)
        gradients = [gradient_of(loss(**clip), logprobs, e) for loss in (Gspo, GspoToken)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def test_bnpo_of_one_rank_is_dapo_with_its_clip(off_policy):
    logprobs, e = off_policy(0)
    dapo = Dapo(clip_high=0.2)
    torch.testing.assert_close(gradient_of(Bnpo(), logprobs, e), gradient_of(dapo, logprobs, e))


def test_a_weight_on_tokens_reaches_them_in_gspo_token_and_their_completion_in_gspo(batch_of):
    e = batch_of([[-1.0, -2.0, -0.5]], [2.0])
    weights = torch.tensor([[0.1, 0.2, 0.6]])
    for loss, want in [(GspoToken(), weights), (Gspo(), torch.full_like(weights, 0.3))]:
        logprobs = e.logprobs_BS.clone().requires_grad_()
        loss.reduce(weights * loss.per_token(logprobs, e)[0], e).backward()
        torch.testing.assert_close(logprobs.grad, -2.0 * want / 3)


@pytest.mark.parametrize("coef", [1.0, 0.3])
def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl(coef, batch_of):
    g = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 7, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    every = logits.log_softmax(-1)  # one completion for each token: the policy's whole support
    e = batch_of([[0.0]] * 7, [0.0] * 7)
    fixed, judged = every.detach()[:, None], teacher.log_softmax(-1)[:, None]
    e = replace(e, logprobs_BS=fixed, reference_BS=judged)
    values, metrics = Distill(coef=coef).per_token(every[:, None], e)
    (fixed.exp() * values).sum().backward()
    pi, apart = fixed[:, 0].exp(), (fixed - judged)[:, 0]
    kl = (pi * apart).sum()
    torch.testing.assert_close(logits.grad, coef * pi * (apart - kl))
    torch.testing.assert_close(float((fixed.exp() * values.detach()).sum()), float(coef * kl))
    assert metrics["teacher_kl"].value() == pytest.approx(float(apart.mean()))


# ---- metrics -------------------------------------------------------------------------------------


def tallied(loss, ratios, advantages, batch_of):
    """The metrics of micro-batches of one completion each, and of one more without a token."""
    tally = Tally()
    for row, advantage in zip(ratios, advantages, strict=True):
        e = batch_of([[-1.0] * len(row)], [advantage])
        tally.add(loss(e.logprobs_BS + torch.tensor([row]).log(), e)[1])
    tally.add(loss(e.logprobs_BS, e.where(torch.tensor([False])))[1])
    return tally.flush()


RATIOS, ADVANTAGES = [[0.5, 2.0, 1.0], [0.5, 2.0]], [1.0, -1.0]


def test_clip_shares_and_ratios_by_hand(batch_of):
    want = {
        "clip_ratio/low_mean": 1 / 5,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_mean": 1 / 5,
        "clip_ratio/high_max": 1 / 3,
        "clip_ratio/region_mean": 2 / 5,
        "importance_ratio/min": 0.5,
        "importance_ratio/mean": 6.0 / 5,
        "importance_ratio/max": 2.0,
        "importance_ratio/clipped_min": 0.5,  # A > 0: the clip has no lower side
        "importance_ratio/clipped_mean": (0.5 + 1.28 + 1 + 0.8 + 2) / 5,
        "importance_ratio/clipped_max": 2.0,  # A < 0: and no upper one
    }
    assert tallied(Dapo(), RATIOS, ADVANTAGES, batch_of) == pytest.approx(want)


def test_a_micro_batch_without_a_token_lowers_no_minimum(batch_of):
    got = tallied(Dapo(), [[0.5, 1.0], [0.5]], [-1.0, -1.0], batch_of)
    assert got["clip_ratio/low_min"] == got["importance_ratio/min"] == 0.5


def test_gspo_counts_completions(batch_of):
    got = tallied(Gspo(), [[2.0, 2.0, 2.0], [4.0, 0.25], [0.5]], [1.0, 1.0, 1.0], batch_of)
    want = {
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_mean": 1 / 3,
        "clip_ratio/high_max": 1.0,
        "clip_ratio/region_mean": 1 / 3,
        "importance_ratio/min": 0.5,
        "importance_ratio/mean": (2 + 1 + 0.5) / 3,
        "importance_ratio/max": 2.0,
        "importance_ratio/clipped_min": 0.5,
        "importance_ratio/clipped_mean": (1 + 4e-4 + 1 + 0.5) / 3,
        "importance_ratio/clipped_max": 1 + 4e-4,
    }
    assert got == pytest.approx(want)


def test_cispo_counts_what_it_capped(batch_of):
    got = tallied(Cispo(clip_high=0.5), RATIOS, ADVANTAGES, batch_of)
    assert got["cispo_clip_ratio"] == pytest.approx(1 / 5)  # A > 0 alone, as TRL
    assert got["importance_ratio/mean"] == pytest.approx(6 / 5)
    assert got["importance_ratio/clipped_mean"] == pytest.approx((0.5 + 1.5 + 1 + 0.5 + 1.5) / 5)
    assert got["importance_ratio/clipped_max"] == pytest.approx(1.5)


def test_sapo_logs_the_weight_that_its_gate_leaves(batch_of):
    got = tallied(Sapo(), RATIOS, ADVANTAGES, batch_of)
    weights = [r / cosh((r - 1) / 2) ** 2 for r in RATIOS[0]]
    weights += [r / cosh(1.05 * (r - 1) / 2) ** 2 for r in RATIOS[1]]
    assert got["importance_ratio/clipped_mean"] == pytest.approx(sum(weights) / 5)
    assert got["importance_ratio/clipped_max"] == pytest.approx(max(weights))
    assert got["importance_ratio/max"] == pytest.approx(2.0)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", CLIPPED)
@pytest.mark.parametrize("clip", [(-0.1, 0.2), (1.0, 0.2), (0.2, -0.1), (0.2, inf), (nan, 0.2)])
def test_a_clip_that_is_no_interval_around_one(loss, clip):
    with pytest.raises(ValueError, match=f"got {clip[0]} and {clip[1]}"):
        loss(clip_low=clip[0], clip_high=clip[1])


@pytest.mark.parametrize("value", [0.0, -1.0, inf, nan])
@pytest.mark.parametrize(
    ("loss", "name"), [(Sapo, "temperature_pos"), (Sapo, "temperature_neg"), (Distill, "coef")]
)
def test_an_option_that_is_not_above_zero_and_finite(loss, name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0 and finite, got {value}"):
        loss(**{name: value})


@pytest.mark.parametrize("value", [-0.5, inf, nan])
def test_cispo_refuses_a_cap_below_one_or_without_bound(value):
    with pytest.raises(ValueError, match=f"^clip_high must be 0 to .*, got {value}"):
        Cispo(clip_high=value)


@pytest.mark.parametrize("name", plugin_names("lightning_qrl.losses"))
def test_a_token_that_the_sampler_hardly_could_choose_gives_finite_numbers(name, off_policy):
    logprobs, e = off_policy(0, 0.5, 8)
    far = replace(e, logprobs_BS=e.logprobs_BS - 200.0, advantages_B=e.advantages_B * 0)
    value, _ = load_plugin("lightning_qrl.losses", name)()(logprobs, far)
    assert torch.isfinite(value)
