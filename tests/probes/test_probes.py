"""The probes pass on what we ship, and each fails when the part that it guards is broken."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from lightning_qrl import grpo
from lightning_qrl.advantages import AdvantageEstimator
from lightning_qrl.experience import Step
from lightning_qrl.launch.process import quiet
from lightning_qrl.losses import _clipped
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.probes import PROBES, run_probe
from lightning_qrl.reports.doctor import verdict_text
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.scoring import Scorer

# ---- the parts, broken ---------------------------------------------------------------------------


def rounding_over_a_tiny_deviation(patch):
    """Advantages in FP32; those of groups of equal rewards are not set to 0."""

    def plain(self, rewards_PG, batch_std=None):
        centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
        return centered_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)

    patch.setattr(AdvantageEstimator, "__call__", plain)


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


def a_rollout_behind(patch):
    """The sampler writes with the weights of the last rollout, and stamps them as today's."""
    sync = Embedded.sync

    def late(self, model, version):
        before, self.kept = getattr(self, "kept", model), deepcopy(model)
        sync(self, before, version)

    patch.setattr(Embedded, "sync", late)


def temperature_left_out(patch):
    """The trainer takes the policy at temperature 1, whatever the sampler's."""
    score = Scorer.__call__
    patch.setattr(Scorer, "__call__", lambda self, experience, _: score(self, experience, 1.0))


def micro_batches_averaged(patch):
    patch.setattr(Step, "scale", 1.0)


def laid_out(change):
    def broken(patch):
        make = grpo.make_experience

        def made(completions, *args):
            return change(make(completions, *args))

        patch.setattr(grpo, "make_experience", made)

    return broken


def mask_one_late(experience):
    return replace(experience, mask_BS=experience.mask_BS.roll(1, dims=1))


def mask_without_the_first_token(experience):
    first_BS = experience.mask_BS & ~experience.mask_BS.roll(1, dims=1)
    first_BS[:, 0] = experience.mask_BS[:, 0]
    return replace(experience, mask_BS=experience.mask_BS & ~first_BS)


def advantages_one_late(experience):
    return replace(experience, advantages_B=experience.advantages_B.roll(1))


def logprobs_one_late(experience):
    return replace(experience, logprobs_BS=experience.logprobs_BS.roll(1, dims=1))


def no_credit_for_earlier_tokens(experience):
    last_BS = experience.mask_BS & ~experience.mask_BS.roll(-1, dims=1)
    last_BS[:, -1] = experience.mask_BS[:, -1]
    return replace(experience, mask_BS=last_BS)


def judged_for_another_prompt(patch):
    judge = PolicyModule.judge
    patch.setattr(PolicyModule, "judge", lambda self, asked, *rest: judge(self, asked[::-1], *rest))


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


BROKEN = {  # the probe that guards it, and what that tells a user to suspect
    "rounding over a tiny deviation": (
        "constant",
        rounding_over_a_tiny_deviation,
        "advantage estimator",
    ),
    "baseline of the batch": ("observation", baseline_of_the_batch, "baseline that of one prompt"),
    "groups interleaved": ("observation", groups_interleaved, "side by side"),
    "sign": ("bandit", scaled_loss(-1.0), "sign (cosine -1)"),
    "scale": ("bandit", scaled_loss(0.5), "scale"),
    "micro-batches": ("bandit", micro_batches_averaged, "over micro-batches too"),
    "ratio": ("bandit", ratio_against_the_current_policy, "importance ratio"),
    "stale weights": ("bandit", a_rollout_behind, "the weights of the last update"),
    "first token": ("bandit", laid_out(mask_without_the_first_token), "alignment: are mask"),
    "advantages": ("bandit", laid_out(advantages_one_late), "advantages those of the completions"),
    "mask": ("delayed", laid_out(mask_one_late), "mask of the same positions"),
    "log-probs": ("delayed", laid_out(logprobs_one_late), "of the same positions"),
    "credit": ("delayed", laid_out(no_credit_for_earlier_tokens), "every token of a completion"),
    "pairing": ("contextual", behind_another_prompt, "laid out behind it"),
    "judging": ("contextual", judged_for_another_prompt, "judged against its own prompt"),
    "positions": ("contextual", sampler_given(position_ids=lambda mask: None), "its positions"),
    "padding": ("contextual", sampler_given(attention_mask=torch.ones_like), "padding, its mask"),
    "temperature": ("contextual", temperature_left_out, "the temperature"),
}
SEEN_BY_ANOTHER = ("scale", "advantages", "log-probs", "credit", "judging", "padding")
FEW = [part for part in BROKEN if part not in SEEN_BY_ANOTHER]
BY_NAME = {probe.name: probe for probe in PROBES}


@pytest.fixture(autouse=True)
def _quietly():
    with quiet():
        yield


@pytest.mark.parametrize("part", FEW)
def test_a_broken_part_fails_the_probe_that_guards_it(part, monkeypatch):
    name, break_it, suspect = BROKEN[part]
    break_it(monkeypatch)
    verdict = run_probe(BY_NAME[name])
    assert not verdict.passed
    assert not any(check.what == "it runs" for check in verdict.checks)
    told = verdict_text(verdict).partition("> suspect ")[2]
    assert told == verdict.probe.suspect
    assert suspect in told
    assert "FAILED" in verdict_text(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("part", BROKEN)
def test_no_probe_before_it_fails(part, monkeypatch):
    name, break_it, _ = BROKEN[part]
    break_it(monkeypatch)
    failed = [probe.name for probe in PROBES if not run_probe(probe).passed]
    assert failed[0] == name
