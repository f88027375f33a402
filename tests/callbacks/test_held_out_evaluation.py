"""Held-out evaluation: when it looks, at what, and that it changes nothing."""

import itertools

import lightning as L
import pytest
import torch

from callbacks.held_out_evaluation import HeldOutEvaluation
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.recipe import load_recipe

SMALL = ["trainer.accelerator=cpu", "grpo.prompts_per_rollout=2", "grpo.group_size=4"]


def trained(fit, recorder, every, steps=5, prompts=6, pass_at=()):
    run = build(load_recipe("base", [*SMALL, f"trainer.max_steps={steps}"]))
    L.seed_everything(0, verbose=False)
    callbacks = [] if every is None else [HeldOutEvaluation(prompts, every, pass_at)]
    fit(run.module, run.data, steps, logger=recorder, callbacks=callbacks)
    return run.module


@pytest.mark.parametrize(
    ("every", "steps", "at"), [(2, 5, [0, 2, 4, 5]), (5, 5, [0, 5]), (100, 3, [0, 3])]
)
def test_it_looks_before_in_between_and_after(fit, recorder, every, steps, at):
    module = trained(fit, recorder, every, steps)
    assert list(module.evaluations) == at
    logged = [(step, m) for step, m in recorder.records if "eval/reward" in m]
    assert [step for step, _ in logged] == at
    for step, metrics in logged:
        assert metrics == {f"eval/{k}": v for k, v in module.evaluations[step].items()}
        assert metrics.keys() == {"eval/reward", "eval/solved"}


def test_with_accumulation_it_looks_once_a_step(fit, recorder):
    run = build(
        load_recipe("base", [*SMALL, "trainer.max_steps=4", "trainer.accumulate_grad_batches=2"])
    )
    fit(run.module, run.data, 4, logger=recorder, callbacks=[HeldOutEvaluation(4, 2)],
        accumulate_grad_batches=2)  # fmt: skip
    assert [step for step, m in recorder.records if "eval/reward" in m] == [0, 2, 4]


def test_looking_changes_nothing(fit, recorder):
    often = trained(fit, recorder, 1, 3).state_dict()
    never = trained(fit, recorder, None, 3).state_dict()
    assert all(torch.equal(tensor, never[name]) for name, tensor in often.items())


def test_the_prompts_are_held_out_and_spread_over_the_split(fit, recorder):
    module = trained(fit, recorder, 1, 1, 7)
    held_out = [prompt.text for prompt in module.task.prompts("held_out")]
    train = {prompt.text for prompt in module.task.prompts("train")}
    seen = [held_out.index(text) for text, *_ in module.samples["held_out"]]
    assert len(seen) == 7
    assert len({b - a for a, b in zip(seen[:-1], seen[1:], strict=True)}) == 1
    assert seen[-1] > len(held_out) / 2
    assert train.isdisjoint(held_out)


def test_pass_at_k_counts_prompts_that_one_of_k_samples_solves(fit, recorder):
    module = trained(fit, recorder, 1, 1, 6, [1, 2, 4])
    metrics = next(m for step, m in recorder.records if step == 1 and "eval/reward" in m)
    solved = [module.task.solved(sample.reward) for sample in module.samples["held_out"]]
    assert len(solved) == 6 * 4
    groups = [solved[i : i + 4] for i in range(0, 24, 4)]
    assert metrics.keys() == {
        "eval/reward",
        "eval/solved",
        *(f"eval/pass_at_{k}" for k in (1, 2, 4)),
    }
    for k in (1, 2, 4):  # over every choice of k of the 4
        chances = [any(c) for group in groups for c in itertools.combinations(group, k)]
        assert metrics[f"eval/pass_at_{k}"] == pytest.approx(sum(chances) / len(chances))
    assert 0 < metrics["eval/pass_at_1"] < metrics["eval/pass_at_4"]
    assert metrics["eval/pass_at_1"] == pytest.approx(metrics["eval/solved"])


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (-1, 5)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="must be at least 1"):
        HeldOutEvaluation(*arguments)


@pytest.mark.parametrize("pass_at", ["[0]", "[-1, 2]", "[2, 2]", "8", "[1.5]", "[a]"])
def test_a_bad_pass_at_is_refused_in_one_line(pass_at):
    with pytest.raises(UserError, match=r"callbacks\.held_out_evaluation.*got ") as refused:
        build(load_recipe("base", [f"callbacks.held_out_evaluation.pass_at={pass_at}"]))
    assert "\n" not in str(refused.value)


def test_another_module_is_refused():
    with pytest.raises(UserError, match="needs a PolicyModule"):
        HeldOutEvaluation().on_train_start(
            L.Trainer(accelerator="cpu", logger=False), L.LightningModule()
        )
