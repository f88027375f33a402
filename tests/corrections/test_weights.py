"""Importance weights under every loss and level: value and gradient as in float64, by hand."""

import itertools
import math
from dataclasses import replace

import correction_oracle as oracle
import pytest
import torch

from lightning_qrl.corrections.base import Level, log_ratios
from lightning_qrl.corrections.stack import Corrections
from lightning_qrl.corrections.weights import Masked, Rejection, Truncated
from lightning_qrl.errors import UserError
from lightning_qrl.experience import split_for_updates
from lightning_qrl.objective import Objective
from lightning_qrl.plugins import load_plugin, plugin_names

LOSSES = plugin_names("lightning_qrl.losses")
LEVELS = Level.__args__
MADE = {
    "truncated": (lambda level: Truncated(level, 1.5), oracle.truncated(1.5)),
    "masked": (lambda level: Masked(level, 0.6, 1.8), oracle.masked(0.6, 1.8)),
    "rejection": (lambda level: Rejection(level, 0.6, 1.8), oracle.rejection(0.6, 1.8)),
}
REFUSED = {("gspo", "token"), ("distill", "sequence"), ("distill", "geometric")}
TAKEN = [pair for pair in itertools.product(LOSSES, LEVELS) if pair not in REFUSED]
taken = pytest.mark.parametrize(("name", "level"), TAKEN)
kinds = pytest.mark.parametrize("kind", MADE)


def loss_of(name):
    return load_plugin("lightning_qrl.losses", name)()


def objective_of(name, *weights):
    objective = Objective(loss_of(name))
    for number, weight in enumerate(weights):
        objective.corrections.add(weight, by=f"w{number}")
    return objective


def gradient_of(objective, scores_of, logprobs, e):
    logprobs.grad = None
    value, metrics = objective(scores_of(logprobs), e)
    value.backward()
    return value.detach(), logprobs.grad.clone(), metrics


def assert_as_by_hand(got, want_value, leaf):
    value, gradient, _ = got
    want_value.backward()
    torch.testing.assert_close(value.double(), want_value.detach(), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=2e-5, atol=1e-6)


@taken
@kinds
def test_value_and_gradient(kind, name, level, apart, scores_of):
    make, f = MADE[kind]
    anchor = "sampler" if kind == "rejection" else "now"
    logprobs, e = apart(0)
    got = gradient_of(objective_of(name, make(level)), scores_of, logprobs, e)
    leaf = logprobs.detach().double().requires_grad_()
    assert_as_by_hand(got, oracle.corrected(name, [(f, level)], leaf, e, anchor), leaf)


@taken
@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_later_updates_weigh_by_the_policy_before_the_first(kind, name, level, apart, scores_of):
    make, f = MADE[kind]
    logprobs, e = apart(3, proximal=name != "reinforce")
    got = gradient_of(objective_of(name, make(level)), scores_of, logprobs, e)
    leaf = logprobs.detach().double().requires_grad_()
    anchor = "now" if name == "reinforce" else "proximal"
    assert_as_by_hand(got, oracle.corrected(name, [(f, level)], leaf, e, anchor), leaf)


def test_a_capped_weight_and_rejection_of_completions(apart, scores_of):
    logprobs, e = apart(4)
    objective = objective_of("dapo", Truncated("token", 1.5), Rejection("geometric", 0.6, 1.8))
    got = gradient_of(objective, scores_of, logprobs, e)
    leaf = logprobs.detach().double().requires_grad_()
    both = [(oracle.truncated(1.5), "token"), (oracle.rejection(0.6, 1.8), "geometric")]
    assert_as_by_hand(got, oracle.corrected("dapo", both, leaf, e, "now"), leaf)
    out = got[2]["rollout_corr/rollout_rs_masked_fraction"].value()
    assert 0 < out < 1


@taken
def test_micro_batches_change_no_gradient(name, level, apart, scores_of):
    objective = objective_of(name, Masked(level, 0.6, 1.8), Rejection(level, 0.7, 1.7))
    logprobs, e = apart(5)
    _, whole, metrics = gradient_of(objective, scores_of, logprobs, e)
    assert whole.any()
    index = torch.arange(8)
    for parts in (2, 4):
        logprobs.grad, told = None, []
        batches = split_for_updates(e, [index], parts)
        for batch, rows in zip(batches, index.tensor_split(parts), strict=True):
            mine = logprobs[rows][:, : batch.mask_BS.shape[1]]
            value, one = objective(scores_of(mine), batch)
            (value * batch.step.scale / parts).backward()
            told.append(one)
        torch.testing.assert_close(logprobs.grad, whole, rtol=1e-5, atol=1e-8)
        for key in metrics:
            if key.startswith("rollout_corr/"):
                merged = told[0][key]
                for other in told[1:]:
                    merged = merged.merge(other[key])
                assert merged.value() == pytest.approx(metrics[key].value(), rel=1e-5), key


@taken
@kinds
def test_with_nothing_to_correct_no_gradient_changes_a_bit(kind, name, level, apart, scores_of):
    logprobs, e = apart(6, spread=0.0)
    value, plain, _ = gradient_of(objective_of(name), scores_of, logprobs, e)
    same, gradient, metrics = gradient_of(
        objective_of(name, MADE[kind][0](level)), scores_of, logprobs, e
    )
    assert plain.any()
    assert torch.equal(gradient, plain)
    assert float(same) == float(value)
    if kind != "rejection":
        assert metrics["rollout_corr/rollout_is_eff_sample_size"].value() == 1
        assert metrics["rollout_corr/rollout_is_oob_ratio"].value() == 0


@kinds
def test_what_is_masked_changes_nothing(kind, apart, scores_of):
    objective = objective_of("dapo", MADE[kind][0]("token"))
    logprobs, e = apart(7)
    value, gradient, metrics = gradient_of(objective, scores_of, logprobs, e)
    junk = logprobs.detach().masked_fill(~e.mask_BS, torch.nan).requires_grad_()
    stale = replace(e, logprobs_BS=e.logprobs_BS.masked_fill(~e.mask_BS, 1e4))
    again, same, told = gradient_of(objective, scores_of, junk, stale)
    assert float(again) == float(value)
    assert torch.equal(same, gradient)
    assert told == metrics


def test_ratios_beyond_any_float_are_bounded(apart):
    logprobs, e = apart(8)
    for level in LEVELS:
        far_BS = log_ratios(e.logprobs_BS + 300, e, level)
        assert float(far_BS.max()) == 20.0


# ---- metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_metrics_of_a_weight(kind, level, apart, scores_of):
    make, f = MADE[kind]
    logprobs, e = apart(9)
    _, _, metrics = gradient_of(objective_of("dapo", make(level)), scores_of, logprobs, e)
    d_BS = (logprobs.detach() - e.logprobs_BS).double()
    rows = [oracle.ratios(d_BS[b][m].tolist(), level) for b, m in enumerate(e.mask_BS) if m.any()]
    r = [ratio for row in rows for ratio in row]
    w = [f(ratio) for ratio in r]
    middle = sum(w) / len(w)
    low, high = (1 / 1.5, 1.5) if kind == "truncated" else (0.6, 1.8)
    want = {
        "mean": sum(r) / len(r),
        "min": min(r),
        "max": max(r),
        "std": math.sqrt(sum((x - middle) ** 2 for x in w) / (len(w) - 1)),
        "eff_sample_size": sum(w) ** 2 / sum(x * x for x in w) / len(w),
        "oob_ratio": sum(x != y for x, y in zip(r, w, strict=True)) / len(r),
        "ratio_fraction_high": sum(x > high for x in r) / len(r),
        "ratio_fraction_low": sum(x < low for x in r) / len(r),
        "seq_mean": sum(sum(row) / len(row) for row in rows) / len(rows),
    }
    prefix = "rollout_corr/rollout_is_"
    got = {k.removeprefix(prefix): m.value() for k, m in metrics.items() if k.startswith(prefix)}
    assert got == pytest.approx(want, rel=2e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_metrics_of_rejection(level, apart, scores_of):
    logprobs, e = apart(10)
    objective = objective_of("dapo", Rejection(level, 0.6, 1.8))
    _, _, metrics = gradient_of(objective, scores_of, logprobs, e)
    d_BS = (logprobs.detach() - e.logprobs_BS).double()
    rows = [oracle.ratios(d_BS[b][m].tolist(), level) for b, m in enumerate(e.mask_BS) if m.any()]
    out = [[not 0.6 <= r <= 1.8 for r in row] for row in rows]
    tokens = sum(len(row) for row in out)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].value() == pytest.approx(
        sum(map(sum, out)) / tokens
    )
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"].value() == pytest.approx(
        sum(map(any, out)) / len(out)
    )


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), list(itertools.product(LOSSES, LEVELS)))
@kinds
def test_levels_that_a_loss_cannot_be_weighed_by(kind, name, level):
    corrections = Corrections()
    corrections.add(MADE[kind][0](level), by="mine")
    if (name, level) not in REFUSED:
        corrections.check(loss_of(name), 1)
        return
    with pytest.raises(UserError, match=rf"callbacks\.mine\.level: loss {name} .* by {level}"):
        corrections.check(loss_of(name), 1)


BAD = [
    (lambda: Truncated("tokens"), "level must be one of token, sequence, geometric"),
    (lambda: Truncated("token", 0.9), "cap must be at least 1"),
    (lambda: Truncated("token", math.nan), "cap must be at least 1"),
    (lambda: Masked("token", -0.1, 2.0), "0 <= low <= 1 <= high"),
    (lambda: Masked("token", 1.1, 2.0), "0 <= low <= 1 <= high"),
    (lambda: Masked("token", 0.5, 0.9), "0 <= low <= 1 <= high"),
    (lambda: Rejection("token", math.nan, 2.0), "0 <= low <= 1 <= high"),
    (lambda: Rejection("sequence", 0.0, math.inf), "nothing would be rejected"),
]


@pytest.mark.parametrize(("make", "says"), BAD)
def test_bad_options(make, says):
    with pytest.raises(ValueError, match=says):
        make()
