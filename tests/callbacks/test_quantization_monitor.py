"""Quantization monitor: when it measures, what, and that it changes nothing."""

import math

import lightning as L
import pytest
import torch

from callbacks.quantization_monitor import QuantizationMonitor, aggregate
from lightning_qrl.analysis.quantization_error import QuantizationError, quantization_error
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.formats import get_format
from lightning_qrl.recipe import load_recipe

SMALL = ["trainer.accelerator=cpu", "grpo.prompts_per_rollout=2", "grpo.group_size=4"]
NAMES = {
    f"quant/weight/{name}"
    for name in (
        *(f"{m}/{a}" for m in ("sqnr_db", "relative_error", "underflow", "saturated")
          for a in ("mean", "worst")),
        *(f"share/{part}" for part in ("scale", "deadzone", "grid", "cross")),
    )
}  # fmt: skip


def trained(fit, recorder, recipe, steps, *callbacks, **settings):
    trainer = {"max_steps": steps, **settings}
    run = build(load_recipe(recipe, [*SMALL, *(f"trainer.{k}={v}" for k, v in trainer.items())]))
    L.seed_everything(0, verbose=False)
    precision = [c for c in run.callbacks.values() if hasattr(c, "declare")]
    callbacks = [*precision, *callbacks]
    return run.module, fit(
        run.module, run.data, steps, logger=recorder, callbacks=callbacks, **settings
    )


def records(recorder):
    return [(step, m) for step, m in recorder.records if any("quant/weight" in k for k in m)]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_it_measures_before_the_first_step_and_every_nth(fit, recorder, micro_batches):
    trained(fit, recorder, "4bitter", 5, QuantizationMonitor(2),
            accumulate_grad_batches=micro_batches)  # fmt: skip
    found = records(recorder)
    assert [step for step, _ in found] == [0, 2, 4]
    assert all(metrics.keys() == NAMES for _, metrics in found)
    names = {name for _, metrics in recorder.records for name in metrics}
    assert not [a for a in names for b in names if b.startswith(f"{a}/")]


def test_the_numbers_are_those_of_the_quantized_weights(fit, recorder):
    module, _ = trained(fit, recorder, "4bitter", 1, QuantizationMonitor(1))
    step, metrics = records(recorder)[-1]
    assert step == 1
    each = []
    for row in module.plan.table():
        if row.quantized:
            weight = module.model.get_submodule(row.layer).weight
            each.append(quantization_error(weight, row.train.weight))
    assert 0 < len(each) < len(module.plan.table())
    sqnr = [error.sqnr_db for error in each]
    assert metrics["quant/weight/sqnr_db/mean"] == pytest.approx(sum(sqnr) / len(sqnr))
    assert metrics["quant/weight/sqnr_db/worst"] == min(sqnr)
    zeroed = [error.fraction("underflowed") for error in each]
    assert metrics["quant/weight/underflow/worst"] == max(zeroed)
    shares = [metrics[f"quant/weight/share/{p}"] for p in ("scale", "deadzone", "grid", "cross")]
    assert sum(shares) == pytest.approx(1)


def test_measuring_changes_nothing(fit, recorder):
    often, _ = trained(fit, recorder, "4bitter", 2, QuantizationMonitor(1))
    never, _ = trained(fit, recorder, "4bitter", 2)
    other = never.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in often.state_dict().items())


def test_where_nothing_is_quantized_it_says_nothing(fit, recorder):
    for recipe in ("base", "bf16"):
        trained(fit, recorder, recipe, 1, QuantizationMonitor(1))
    assert records(recorder) == []


@pytest.mark.parametrize("stopped_at", [2, 3])
def test_a_resumed_run_measures_each_step_once(fit, recorder, tmp_path, stopped_at):
    _, first = trained(fit, recorder, "4bitter", stopped_at, QuantizationMonitor(2))
    first.save_checkpoint(tmp_path / "x.ckpt")
    run = build(load_recipe("4bitter", [*SMALL, "trainer.max_steps=5"]))
    precision = [c for c in run.callbacks.values() if hasattr(c, "declare")]
    fit(run.module, run.data, 5, ckpt_path=tmp_path / "x.ckpt", logger=recorder,
        callbacks=[*precision, QuantizationMonitor(2)])  # fmt: skip
    assert [step for step, _ in records(recorder)] == [0, 2, 4]


def test_a_layer_without_any_error():
    exact = quantization_error(torch.ones(4, 16), get_format("nvfp4", outer_scale="row"))
    assert exact.error == 0
    metrics = aggregate([exact, QuantizationError(elements=1, signal=4, error=1, grid=1)])
    assert "quant/weight/sqnr_db/mean" not in metrics
    assert metrics["quant/weight/sqnr_db/worst"] == pytest.approx(10 * math.log10(4))
    assert all(math.isfinite(value) for value in metrics.values())


def test_bad_arguments_and_another_module():
    with pytest.raises(ValueError, match="must be at least 1"):
        QuantizationMonitor(0)
    trainer = L.Trainer(accelerator="cpu", logger=False)
    with pytest.raises(UserError, match="needs a PolicyModule"):
        QuantizationMonitor().on_train_start(trainer, L.LightningModule())
