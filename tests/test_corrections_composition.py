"""Cures in recipes: which go together, what each leaves alone, and a replay of what they did."""

import itertools
import math

import pytest
import torch
from grpo_parts import Watched, data_of, module_of

from callbacks.forward_quantization import ForwardQuantization
from callbacks.masked_importance_sampling import MaskedImportanceSampling
from callbacks.rejection_sampling import RejectionSampling
from callbacks.truncated_importance_sampling import TruncatedImportanceSampling
from callbacks.vcpo import VCPO
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.launch import rehearse
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.losses.reinforce import Reinforce
from lightning_qrl.recipe import load_recipe
from lightning_qrl.scoring import Scorer

TIS, MIS = "callbacks.truncated_importance_sampling", "callbacks.masked_importance_sampling"
REJECT, OPOB = "callbacks.rejection_sampling", "callbacks.vcpo"
TEACHER = ["grpo.loss=distill", "grpo.reference=embedded"]

REFUSED = [
    ([f"{TIS}={{}}", f"{MIS}={{}}"], "masked_importance_sampling and truncated_importance_sampling"
     " each weigh with the importance ratio, which would count twice"),
    ([f"{TIS}.level=words"], f"{TIS}.level: Input should be 'token', 'sequence' or 'geometric'"),
    ([f"{TIS}.cap=0.5"], "truncated_importance_sampling: cap must be at least 1"),
    ([f"{MIS}.low=2"], "masked_importance_sampling: low and high must hold 1"),
    ([f"{REJECT}={{low: 0.0, high: .inf}}"], "rejection_sampling: low 0 and high inf hold every"),
    ([f"{TIS}.level=token", "grpo.loss=gspo", "grpo.clip_low=0.01"],
     f"{TIS}.level: loss gspo cannot be weighed by token, only by sequence or geometric"),
    ([f"{REJECT}.level=sequence", *TEACHER],
     f"{REJECT}.level: loss distill cannot be weighed by sequence, only by token"),
    ([f"{TIS}.level=geometric", *TEACHER],
     f"{TIS}.level: loss distill cannot be weighed by geometric, only by token"),
    ([f"{OPOB}={{}}", *TEACHER], f"{OPOB}.baseline: loss distill does not learn from rewards"),
    ([f"{OPOB}={{}}", "grpo.minibatches=2"], f"{OPOB}.baseline: it needs whole groups"),
    ([f"{OPOB}={{}}", "grpo.leverage=0.9"], f"{OPOB}.baseline: it needs whole groups"),
    ([f"{OPOB}={{}}", "trainer.accumulate_grad_batches=32"], f"{OPOB}.baseline: it needs whole"),
    ([f"{OPOB}.base=0"], "vcpo: base must be above 0"),
]  # fmt: skip

ALLOWED = [
    [f"{TIS}={{level: sequence, cap: 8}}", f"{OPOB}={{}}"],  # the whole of VCPO
    [f"{TIS}={{}}", f"{REJECT}={{level: geometric, low: 0.999, high: 1.001}}"],
    [f"{MIS}={{level: sequence, low: 0.0, high: 3.0}}"],
    [f"{TIS}={{}}", "grpo.loss=cispo"],
    [f"{TIS}.level=geometric", "grpo.loss=gspo"],
    [f"{TIS}={{}}", *TEACHER],
    [f"{OPOB}={{}}", "trainer.accumulate_grad_batches=16"],
    [f"{OPOB}.baseline=false", "grpo.minibatches=2", "grpo.leverage=0.9"],
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED)
def test_what_is_refused_before_anything_is_written(overrides, says):
    with pytest.raises(UserError) as refused:
        rehearse(build(load_recipe("base", overrides)))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("overrides", ALLOWED)
def test_what_goes_together(overrides):
    rehearse(build(load_recipe("base", overrides)))


# ---- training ------------------------------------------------------------------------------------

CURES = {
    "tis": lambda: TruncatedImportanceSampling(cap=1.0),
    "rejection": lambda: RejectionSampling("sequence", 0.9, 1.1),
    "vcpo": VCPO,
}


def test_the_order_of_cures_is_irrelevant_to_the_last_bit(tiny_policy, parity, fit):
    def weights(order):
        module = module_of(tiny_policy, parity)
        callbacks = [CURES[name]() for name in order]
        fit(module, data_of(parity, num_iterations=2), 2, callbacks=callbacks)
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    first = weights(list(CURES))
    for order in list(itertools.permutations(CURES))[3::2]:
        assert torch.equal(weights(order), first), order
    assert not torch.equal(weights(["tis", "rejection"]), first)


IDLE = [
    TruncatedImportanceSampling,
    lambda: MaskedImportanceSampling("sequence"),
    lambda: RejectionSampling("geometric"),
    lambda: VCPO(baseline=False),
]


@pytest.mark.parametrize("make", IDLE)
def test_with_one_policy_on_both_sides_a_cure_changes_nothing_but_rounding(
    make, tiny_policy, parity, fit
):
    def weights(*callbacks):
        module = module_of(tiny_policy, parity)
        fit(module, data_of(parity), 2, callbacks=list(callbacks))
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    plain, cured = weights(), weights(make())
    assert float((plain - cured).abs().max()) < 2e-5  # of steps of 2e-2


class Kept(Watched):
    copies = True


def scored(model, batch):
    with torch.no_grad():
        return Scorer(model, shared_prefix=False)(batch, 1.0).logprobs


@pytest.mark.parametrize("loss", [Dapo(), Reinforce()])
def test_three_updates_on_a_rollout_replayed_with_the_weights_of_each(
    loss, tiny_policy, parity, fit, recorder
):
    module = module_of(tiny_policy, parity, Kept, loss=loss)
    callbacks = [TruncatedImportanceSampling(cap=1.02)]
    fit(module, data_of(parity, num_iterations=3), 3, callbacks=callbacks, logger=recorder)
    first = module.seen[0][1]
    for (batch, model), metrics in zip(module.seen, recorder.steps, strict=True):
        mask, now = batch.mask_BS, scored(model, batch)
        before = scored(first, batch)
        trainer = before if loss.uses_ratio else now
        r = (trainer - batch.logprobs_BS.double())[mask].exp()
        prefix = "rollout_corr/rollout_is_"
        for name, want in (("mean", r.mean()), ("min", r.min()), ("max", r.max())):
            assert metrics[f"{prefix}{name}"] == pytest.approx(float(want), rel=1e-5)
        w = r.clamp_max(1.02)
        a = batch.advantages_B.double()[:, None].expand(mask.shape)[mask]
        if loss.uses_ratio:
            rho = (now - before)[mask].exp()
            value = -torch.minimum(rho * a, rho.clamp(0.8, 1.28) * a)
            want = float((value * w).sum() / mask.sum())
        else:
            want = float((-a * now[mask] * w).sum() / mask.any(dim=1).sum())
        assert metrics["train/loss"] == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert math.isfinite(want)
    moved = [m["rollout_corr/rollout_is_max"] for m in recorder.steps]
    assert (max(moved) > 1.02) == (not loss.uses_ratio)  # only what moves is cut


def test_before_the_first_update_the_losses_ratio_is_one_whatever_a_number_depends_on(
    train, recorder
):
    """One scale for a tensor: a token's numbers depend on those that are computed with it."""
    train(
        2,
        ForwardQuantization("nvfp4", outer_scale="tensor"),
        TruncatedImportanceSampling(),
        minibatches=2,
        micro_batches=3,
    )
    first, second = (m for _, m in recorder.records if "train/importance_ratio/min" in m)
    for end in ("min", "max"):
        assert first[f"train/importance_ratio/{end}"] == 1.0
        assert second[f"train/importance_ratio/{end}"] != 1.0
        assert first[f"train/sampling/importance_sampling_ratio/{end}"] != 1.0
