"""The probes pass on what we ship, and each fails when the part that it guards is broken."""

from dataclasses import replace

import pytest
import torch

from lightning_qrl import advantages, grpo
from lightning_qrl.advantages import AdvantageEstimator
from lightning_qrl.launch.process import quiet
from lightning_qrl.losses import _clipped
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.probes import PROBES, run_probe
from lightning_qrl.reports.doctor import verdict_text
from lightning_qrl.rollouts.embedded import Embedded

# ---- the parts, broken ---------------------------------------------------------------------------


def rounding_over_a_tiny_deviation(patch):
    """Advantages of groups of equal rewards are not set to 0."""
    patch.setattr(advantages, "zero_variance", lambda r: torch.zeros(len(r), dtype=torch.bool))


def baseline_of_the_batch(patch):
    def whole(self, rewards_PG, batch_std=None):
        if (rewards_PG == rewards_PG[0, 0]).all():
            return torch.zeros_like(rewards_PG)
        return (rewards_PG - rewards_PG.mean()) / (rewards_PG.std() + 1e-4)

    patch.setattr(AdvantageEstimator, "__call__", whole)


def groups_interleaved(patch):
    """Prompts are repeated one after the other where each is to be repeated at once."""
    judge = PolicyModule.judge

    def cycled(self, prompts, completions, split):
        each = len(completions) // len(prompts)
        return judge(self, [*prompts] * each, completions, split)

    patch.setattr(PolicyModule, "judge", cycled)


def scaled_loss(factor):
    def broken(patch):
        reduce = Dapo.reduce
        patch.setattr(Dapo, "reduce", lambda *args: factor * reduce(*args))

    return broken


def ratio_against_the_current_policy(patch):
    """The ratio is always 1: right in the first update on a rollout, wrong in the second."""
    patch.setattr(
        _clipped, "log_ratio", lambda logprobs_BS, experience: logprobs_BS - logprobs_BS.detach()
    )


def laid_out(change):
    def broken(patch):
        make = grpo.make_experience

        def made(completions, *args):
            return change(make(completions, *args))

        patch.setattr(grpo, "make_experience", made)

    return broken


def mask_one_late(experience):
    return replace(experience, mask_BS=experience.mask_BS.roll(1, dims=1))


def logprobs_one_late(experience):
    return replace(experience, logprobs_BS=experience.logprobs_BS.roll(1, dims=1))


def no_credit_for_earlier_tokens(experience):
    last_BS = experience.mask_BS & ~experience.mask_BS.roll(-1, dims=1)
    last_BS[:, -1] = experience.mask_BS[:, -1]
    return replace(experience, mask_BS=last_BS)


def behind_another_prompt(patch):
    """Completions are laid out behind the prompts of others."""
    make = grpo.make_experience

    def made(completions, *args):
        prompts = [completion.prompt_ids for completion in reversed(completions)]
        swapped = [replace(c, prompt_ids=p) for c, p in zip(completions, prompts, strict=True)]
        return make(swapped, *args)

    patch.setattr(grpo, "make_experience", made)


def sampler_given(**instead):
    """The sampler's model does not see what `instead` replaces."""

    def broken(patch):
        scores = Embedded._scores

        def scored(self, model, ids_DP, mask_DP, cache):
            def blind(**inputs):
                return model(**{**inputs, **{k: make(mask_DP) for k, make in instead.items()}})

            return scores(self, blind, ids_DP, mask_DP, cache)

        patch.setattr(Embedded, "_scores", scored)

    return broken


BROKEN = {
    "rounding over a tiny deviation": ("constant", rounding_over_a_tiny_deviation),
    "baseline of the batch": ("observation", baseline_of_the_batch),
    "groups interleaved": ("observation", groups_interleaved),
    "sign": ("bandit", scaled_loss(-1.0)),
    "scale": ("bandit", scaled_loss(0.5)),
    "ratio": ("bandit", ratio_against_the_current_policy),
    "mask": ("delayed", laid_out(mask_one_late)),
    "log-probs": ("delayed", laid_out(logprobs_one_late)),
    "credit": ("delayed", laid_out(no_credit_for_earlier_tokens)),
    "pairing": ("contextual", behind_another_prompt),
    "positions": ("contextual", sampler_given(position_ids=lambda mask: None)),
    "padding": ("contextual", sampler_given(attention_mask=torch.ones_like)),
}
FEW = [part for part in BROKEN if part not in ("scale", "log-probs", "credit", "padding")]
BY_NAME = {probe.name: probe for probe in PROBES}


@pytest.fixture(autouse=True)
def _quietly():
    with quiet():
        yield


@pytest.mark.parametrize("part", FEW)
def test_a_broken_part_fails_the_probe_that_guards_it(part, monkeypatch):
    name, break_it = BROKEN[part]
    break_it(monkeypatch)
    verdict = run_probe(BY_NAME[name])
    assert not verdict.passed
    assert not any(check.what == "it runs" for check in verdict.checks)
    assert f"suspect {verdict.probe.suspect}" in verdict_text(verdict)
    assert "FAILED" in verdict_text(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("part", BROKEN)
def test_no_probe_before_it_fails(part, monkeypatch):
    name, break_it = BROKEN[part]
    break_it(monkeypatch)
    failed = [probe.name for probe in PROBES if not run_probe(probe).passed]
    assert failed[0] == name
