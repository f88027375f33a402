"""The section ``grpo``: what it becomes, and each thing that cannot work, refused in one line."""

import re

import pytest

from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.losses.reinforce import Reinforce
from lightning_qrl.losses.sapo import Sapo
from lightning_qrl.recipe import load_recipe

RANDOM = "policy.init=random"


def built(*overrides):
    return build(load_recipe("base", overrides))


def refused(*overrides, recipe="base"):
    with pytest.raises(UserError) as said:
        build(load_recipe(recipe, overrides))
    assert "\n" not in str(said.value)
    return str(said.value)


# ---- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        ([], Dapo()),
        (["grpo.loss={name: sapo, temperature_neg: 1.2}"], Sapo(temperature_neg=1.2)),
        (["grpo.loss=reinforce"], Reinforce()),
        (["grpo.loss.name=reinforce"], Reinforce()),
        (["grpo.clip_high=0.5"], Dapo(clip_high=0.5)),
        (["grpo.loss={name: dapo, clip_low: 0.1}", "grpo.clip_high=0.5"], Dapo(0.1, 0.5)),
        (["grpo.clip_low=null"], Dapo()),
    ],
)
def test_a_loss_and_its_options(overrides, loss):
    assert built(*overrides).module.loss == loss


LOSSES = [
    ("grpo.loss=nothing", "grpo.loss: 'nothing' is not in losses; known: bnpo, cispo"),
    ("grpo.loss=gspo_tokens", "grpo.loss: 'gspo_tokens' is not in losses; did you mean gspo_token"),
    ("grpo.loss=", "grpo.loss: give the name of a loss, one of bnpo"),
    ("grpo.loss=[dapo]", "grpo.loss: give the name of a loss, one of bnpo"),
    ("grpo.loss={temperature_neg: 1.2}", "grpo.loss: give the name of a loss, one of bnpo"),
    ("grpo.loss={name: sapo, temprature_neg: 1}", "grpo.loss.temprature_neg: no such key; did you"),
    ("grpo.loss={name: sapo, temperature_neg: x}", "grpo.loss.temperature_neg: Input should be a"),
    ("grpo.loss={name: sapo, temperature_neg: -1}", "grpo.loss: temperature_neg must be above 0"),
    ("grpo.loss={name: reinforce, clip_low: 0.2}", "grpo.loss.clip_low: no such key"),
    ("grpo.loss=reinforce grpo.clip_low=0.2", "grpo.clip_low: loss reinforce has no such option"),
    ("grpo.loss=cispo grpo.clip_low=0.2", "grpo.clip_low: loss cispo has no such option; it takes"),
    ("grpo.loss=sapo grpo.clip_high=0.2", "grpo.clip_high: loss sapo has no such option; it takes"),
    ("grpo.clip_low=1.0", "grpo: clip_low must be in [0, 1)"),
    ("grpo.clip_low=-0.1", "grpo: clip_low must be in [0, 1)"),
    (
        "grpo.clip_high=.inf",
        "grpo: clip_low must be in [0, 1) and clip_high at least 0 and at most",
    ),
    ("grpo.clip_high=[0.2]", "grpo.clip_high: Input should be a valid number"),
]

REFERENCES = [
    ("grpo.loss=distill", "grpo: loss distill needs a reference policy; set grpo.reference"),
    ("grpo.loss=distill grpo.kl_coef=0.1", "grpo.loss: it needs a teacher; set grpo.reference"),
    ("grpo.reference=embedded", "grpo: reference does nothing: set kl_coef, or loss=distill, or"),
    (f"grpo.kl_coef=0.1 {RANDOM}", "grpo.kl_coef: a policy that begins with random weights is no"),
    ("grpo.kl_coef=0.1 grpo.reference=5", "grpo.reference: expected the name of a policy, got 5"),
    ("grpo.kl_coef=0.1 grpo.reference=/nowhere", "grpo.reference: policy /nowhere: there is no"),
    ("grpo.kl_coef=0.1 grpo.reference=''", "grpo.reference: policy"),
    ("grpo.kl_coef=-0.1", "grpo: kl_coef must be at least 0 and finite"),
    ("grpo.kl_coef=.inf", "grpo: kl_coef must be at least 0 and finite"),
    ("grpo.kl_coef=1 grpo.kl_estimator=k4", "grpo.kl_estimator: Input should be 'k1'"),
    ("grpo.loss={name: distill, coef: 0} grpo.reference=embedded", "grpo.loss: coef must be above"),
]

NUMBERS = [
    ("grpo.group_size=1", "grpo: group_size must be at least 2, got 1: a completion is judged"),
    (
        "grpo.minibatches=3",
        "grpo: 256 completions (prompts_per_rollout x group_size) do not divide",
    ),
    (
        "grpo.minibatches=1 trainer.accumulate_grad_batches=3",
        "accumulate_grad_batches=3 equal parts",
    ),
    (
        "grpo.minibatches=512",
        "grpo: 256 completions (prompts_per_rollout x group_size) do not divi",
    ),
    ("grpo.num_iterations=0", "grpo: num_iterations must be at least 1, got 0"),
    ("rollout.top_p=0", "rollout: top_p must be above 0 and at most 1, got 0"),
    ("rollout.top_p=1.1", "rollout: top_p must be above 0 and at most 1, got 1.1"),
    ("rollout.top_p=.nan", "rollout: top_p must be above 0 and at most 1, got nan"),
    ("rollout.top_k=-1", "rollout: top_k must be at least 0, got -1"),
    ("rollout.top_k=1.5", "rollout.top_k: Input should be a valid integer"),
    ("rollout.min_p=1.0", "rollout: min_p must be at least 0 and below 1, got 1.0"),
    ("grpo.overlong_buffer=9", "grpo: overlong_buffer=9 is longer than rollout.max_new_tokens=8"),
    ("grpo.overlong_buffer=-1", "grpo: overlong_buffer must be at least 0, got -1"),
    ("grpo.overlong_buffer=2 grpo.overlong_penalty=0", "grpo: overlong_penalty must be above 0"),
    ("grpo.overlong_penalty=2.0", "grpo.overlong_penalty: it does nothing without"),
    ("grpo.kl_estimator=k2", "grpo.kl_estimator: it does nothing without grpo.kl_coef"),
    ("rollout.top_k=1", "rollout.top_k: all completions of a prompt would be the same"),
    ("grpo.loss={name: dapo, clip_low: 0.1} grpo.clip_low=0.2", "gives clip_low too"),
    ("grpo.loss=distill grpo.reference=embedded grpo.leverage=0.5", "grpo.leverage: loss distill"),
    (
        "grpo.loss=distill grpo.reference=embedded grpo.dynamic_sampling=1",
        "grpo.dynamic_sampling: loss distill does not learn from rewards",
    ),
    ("grpo.leverage=0", "grpo: leverage must be above 0 and at most 1, got 0"),
    ("grpo.leverage=1.5", "grpo: leverage must be above 0 and at most 1, got 1.5"),
    ("grpo.leverage=.nan", "grpo: leverage must be above 0 and at most 1, got nan"),
    ("grpo.dynamic_sampling=-1", "grpo: dynamic_sampling must be at least 0, got -1"),
    ("grpo.dynamic_sampling=true", "grpo.dynamic_sampling: Input should be a valid integer"),
    ("grpo.baseline=median", "grpo.baseline: Input should be 'mean' or 'leave_one_out'"),
    ("grpo.scale_rewards=all", "grpo.scale_rewards: Input should be 'group', 'batch' or 'none'"),
    ("grpo.shared_prefix=5", "grpo.shared_prefix: Input should be a valid boolean"),
    ("grpo.on_reward_error=ignore", "grpo.on_reward_error: Input should be 'stop' or 'skip'"),
    ("grpo.mask_truncated_completions=2", "grpo.mask_truncated_completions: Input should be a va"),
    ("grpo.norm_by_std=true", "grpo.norm_by_std: no such key"),
]


@pytest.mark.parametrize(("override", "says"), [*LOSSES, *REFERENCES, *NUMBERS])
def test_what_cannot_work_is_refused_in_one_line(override, says):
    message = refused(*re.split(r" (?=grpo\.|policy\.|trainer\.)", override))
    assert message.startswith("command line: ")
    assert says in message


def test_a_file_of_ones_own_is_named(tmp_path):
    file = tmp_path / "mine.yaml"
    for line, says in (
        ("loss: nothing", "grpo.loss: 'nothing' is not in losses"),
        ("clip_low: 2.0", "grpo: clip_low must be in [0, 1)"),
        ("leverage: 0.0", "grpo: leverage must be above 0"),
        ("grup_size: 4", "grpo.grup_size: no such key; did you mean group_size?"),
        ("reference: embedded", "grpo: reference does nothing"),
    ):
        file.write_text(f"extends: base\ngrpo:\n  {line}\n")
        assert refused(recipe=str(file)).startswith(f"{file}: {says}")


# ---- each key goes to its part -------------------------------------------------------------------


def test_every_part_gets_its_keys():
    run = built(
        "grpo.baseline=leave_one_out", "grpo.scale_rewards=none", "grpo.kl_coef=0.5",
        "grpo.kl_estimator=k2", "grpo.mask_truncated_completions=true", "grpo.overlong_buffer=3",
        "grpo.overlong_penalty=0.5", "grpo.dynamic_sampling=2", "grpo.leverage=0.5",
        "grpo.num_iterations=3", "grpo.shared_prefix=false", "grpo.on_reward_error=skip",
    )  # fmt: skip
    module, data = run.module, run.data
    advantages, kl, overlong = module.advantages, module.objective.kl, module.overlong
    assert (advantages.baseline, advantages.scale_rewards) == ("leave_one_out", "none")
    assert (kl.kl_coef, kl.kl_estimator) == (0.5, "k2")
    assert overlong.mask_truncated_completions
    assert (overlong.overlong_buffer, overlong.overlong_penalty) == (3, 0.5)
    assert (data.dynamic_sampling, data.leverage, data.num_iterations) == (2, 0.5, 3)
    assert (module.shared_prefix, module.on_reward_error) == (False, "skip")
    assert data.group_size == module.group_size == 16


def test_a_kl_penalty_is_on_the_policy_it_starts_from_unless_another_is_named():
    assert built().module.reference is None
    assert built("grpo.kl_coef=0.1").module.reference.policy.name == "embedded"
    named = built("grpo.kl_coef=0.1", "grpo.reference=embedded-moe")
    assert named.module.reference.policy.name == "embedded-moe"
    assert (
        built("grpo.kl_coef=0.1", RANDOM, "grpo.reference=embedded").module.reference.policy.init
        == "pretrained"
    )
    assert built("grpo.loss=distill", "grpo.reference=embedded").module.loss.needs_reference


def test_a_reference_of_other_tokens_is_refused_when_the_recipe_is_read(tiny_policy):
    message = refused("grpo.loss=distill", f"grpo.reference={tiny_policy.name}")
    assert message.startswith("command line: grpo.reference: reference ")
    assert "has other tokens than policy embedded" in message
