"""Sampled completions: a few rows at each look."""

import json
import math

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.sampled_completions import SampledCompletions
from lightning_qrl.build import build
from lightning_qrl.recipe import load_recipe
from lightning_qrl.tasks.arithmetic import Arithmetic

SMALL = ["trainer.accelerator=cpu", "grpo.prompts_per_rollout=2", "grpo.group_size=4"]


def looks(fit, recorder, callback, steps, micro_batches=1):
    overrides = [f"trainer.max_steps={steps}", f"trainer.accumulate_grad_batches={micro_batches}"]
    run = build(load_recipe("base", [*SMALL, *overrides]))
    tables = []
    recorder.log_table = lambda columns, name: tables.append((name, columns))
    fit(run.module, run.data, steps, logger=recorder, callbacks=[callback],
        accumulate_grad_batches=micro_batches)  # fmt: skip
    return run.module, tables


@pytest.mark.parametrize(("every", "steps", "at"), [(2, 5, [1, 2, 4, 5]), (20, 3, [1, 3])])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_it_looks_at_the_first_every_nth_and_the_last_step(
    fit, recorder, every, steps, at, micro_batches
):
    _, tables = looks(fit, recorder, SampledCompletions(every, 3), steps, micro_batches)
    assert [columns["step"] for _, columns in tables] == [(step,) * 3 for step in at]
    assert {name for name, _ in tables} == {"completions.json"}


def test_the_rows_are_what_was_judged(fit, recorder):
    module, tables = looks(fit, recorder, SampledCompletions(1, 100), 1)
    columns = tables[0][1]
    names = ("prompt", "completion", "reward", "version")
    rows = list(zip(*(columns[name] for name in names), strict=True))
    assert set(columns["split"]) == {"train"}
    assert rows == module.samples["train"]
    assert len(rows) == 8


def test_a_logger_without_tables_is_no_mistake(fit):
    run = build(load_recipe("base", [*SMALL, "trainer.max_steps=1"]))
    trainer = fit(run.module, run.data, 1, callbacks=[SampledCompletions(1, 1)])
    assert trainer.global_step == 1


def test_a_resumed_run_looks_at_each_step_once(fit, recorder, tmp_path):
    steps = []
    recorder.log_table = lambda columns, name: steps.append(columns["step"][0])
    every = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)
    for until, start in ((2, None), (4, tmp_path / "step=2.ckpt")):
        run = build(load_recipe("base", [*SMALL, "trainer.accumulate_grad_batches=2"]))
        fit(run.module, run.data, until, ckpt_path=start, logger=recorder,
            callbacks=[SampledCompletions(2, 1), every], accumulate_grad_batches=2,
            enable_checkpointing=True)  # fmt: skip
    assert steps == [1, 2, 4]


class Unsure(Arithmetic):
    """Has no verdict on the first completion of a prompt."""

    def reward(self, prompt, completion):
        self.asked = getattr(self, "asked", -1) + 1
        return super().reward(prompt, completion) if self.asked % 4 else math.nan


def test_a_missing_reward_is_an_empty_cell(fit, recorder):
    run = build(load_recipe("base", [*SMALL, "trainer.max_steps=1"]))
    run.module.task = Unsure()
    tables = []
    recorder.log_table = lambda columns, name: tables.append(columns)
    fit(run.module, run.data, 1, logger=recorder, callbacks=[SampledCompletions(1, 8)])
    rewards = tables[0]["reward"]
    assert [i for i, reward in enumerate(rewards) if reward is None] == [0, 4]
    json.dumps(rewards, allow_nan=False)


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="must be at least 1"):
        SampledCompletions(*arguments)
    assert issubclass(SampledCompletions, L.Callback)
