"""Recipes, Lightning and checkpoints: faults that users met elsewhere, each right here.

The numbers are those of the list that the tests follow; each docstring links to the report. 41 is
no row of it.
"""

import pytest
import torch
from grpo_parts import data_of, module_of
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from callbacks.bf16_tail import BF16Tail
from callbacks.dequantized_backward import DequantizedBackward
from callbacks.forward_quantization import ForwardQuantization
from callbacks.gradient_noise_scale import GradientNoiseScale
from lightning_qrl.build import build
from lightning_qrl.launch import rehearse
from lightning_qrl.recipe import load_recipe

TIMED = ("step_time", "tokens_per_second", "timing_s/")


def callbacks_of(*overrides, without=(), recipe="4bitter"):
    return load_recipe(recipe, overrides, without).values["callbacks"]


def stack():
    return [
        ForwardQuantization("nvfp4", outer_scale="row", rounding="stochastic"),
        DequantizedBackward(),
        BF16Tail(0.5),
    ]


def saver(folder):
    return ModelCheckpoint(
        folder, filename="{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True
    )


def weights(module):
    return {name: value.clone() for name, value in module.model.state_dict().items()}


def unlike(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_row_38_one_argument_of_one_callback_changes_nothing_else():
    """https://github.com/Lightning-AI/pytorch-lightning/issues/15256 ; nothing is discarded."""
    plain = callbacks_of()
    changed = callbacks_of("callbacks.bf16_tail.fraction=0.5")
    assert changed == {**plain, "bf16_tail": {"fraction": 0.5}}
    more = callbacks_of("callbacks.early={_target_: lightning.pytorch.callbacks.Timer}")
    assert list(more) == [*plain, "early"]
    assert {key: more[key] for key in plain} == plain


def test_row_39_callbacks_are_appended_and_deleted_by_their_keys(tmp_path):
    """https://github.com/facebookresearch/hydra/issues/1939 ; a mapping, not a list."""
    plain = callbacks_of()
    (tmp_path / "mine.yaml").write_text(
        "extends: 4bitter\n"
        "callbacks:\n"
        "  bf16_tail: null\n"
        "  wider: {_target_: callbacks.bf16_tail.BF16Tail, fraction: 0.5}\n"
    )
    mine = callbacks_of(recipe=str(tmp_path / "mine.yaml"))
    assert list(mine) == [*(key for key in plain if key != "bf16_tail"), "wider"]
    rest = {key: value for key, value in plain.items() if key != "bf16_tail"}
    assert callbacks_of("callbacks.bf16_tail=null") == rest
    assert callbacks_of(without=["bf16_tail"]) == rest


def test_row_40_two_callbacks_of_one_class_live_together_and_resume(
    tiny_policy, parity, fit, tmp_path
):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/6467 ; also in a checkpoint."""
    second = "callbacks.first_half={_target_: callbacks.bf16_tail.BF16Tail, fraction: 0.5}"
    run = build(load_recipe("4bitter", [second]))
    kept = {by for row in rehearse(run).table() for by in row.kept_by}
    assert {"bf16_tail", "first_half"} <= kept

    def two():
        noise = [GradientNoiseScale(decay=0.5), GradientNoiseScale(decay=0.9)]  # with a state
        return [*stack(), BF16Tail(0.1), *noise, saver(tmp_path)]

    data = data_of(parity, micro_batches=2)
    parts = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    fit(module_of(tiny_policy, parity), data, 1, callbacks=two(), **parts)
    again = module_of(tiny_policy, parity)
    fit(again, data, 2, callbacks=two(), ckpt_path=tmp_path / "step=1.ckpt", **parts)
    assert again.global_step == 2


def test_row_42_checkpoints_hold_plain_weights_under_any_stack(tiny_policy, parity, fit, tmp_path):
    """https://github.com/pytorch/ao/issues/2478 ; plain transformers and any other stack read them.

    Taking a callback out, or putting one in, and going on: that is the ablation.
    """
    quantized = module_of(tiny_policy, parity)
    fit(quantized, data_of(parity), 1, callbacks=[*stack(), saver(tmp_path)],
        enable_checkpointing=True)  # fmt: skip
    path = tmp_path / "step=1.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    plain = tiny_policy.build()
    assert set(state) == {f"model.{name}" for name in plain.state_dict()}
    assert all(type(value) is torch.Tensor and value.dtype == torch.float32
               for value in state.values())  # fmt: skip
    plain.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    assert unlike(weights(quantized), plain.state_dict()) == []
    for others in ([], stack()[:1], [*stack(), BF16Tail(1.0)]):
        module = module_of(tiny_policy, parity)
        fit(module, data_of(parity), 2, ckpt_path=path, callbacks=others)
        assert module.global_step == 2
        assert unlike(weights(module), weights(quantized)) != []
    quantized.policy.save(quantized.model, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert unlike(loaded.state_dict(), weights(quantized)) == []


@pytest.mark.parametrize("die_at", [2, 4])
def test_row_43_a_resumed_run_equals_an_uninterrupted_one_step_for_step(
    die_at, tiny_policy, parity, fit, recorder, tmp_path
):
    """https://github.com/huggingface/trl/issues/3247 ; prompts, draws, noise, metrics, steps."""

    def run(steps, logger, **options):
        module = module_of(tiny_policy, parity)
        data = data_of(parity, prompts_per_rollout=2, minibatches=2)
        fit(module, data, steps, callbacks=[*stack(), saver(tmp_path)], logger=logger,
            enable_checkpointing=True, **options)  # fmt: skip
        return module

    whole = run(6, recorder)
    rest, later = type(recorder)(), tmp_path / f"step={die_at}.ckpt"
    resumed = run(6, rest, ckpt_path=later)
    assert unlike(weights(whole), weights(resumed)) == []

    def shown(logger):
        return [(step, {k: v for k, v in m.items() if not any(t in k for t in TIMED)})
                for step, m in logger.records if "train/loss" in m]  # fmt: skip

    assert [step for step, _ in shown(recorder)] == [1, 2, 3, 4, 5, 6]
    assert shown(rest) == shown(recorder)[die_at:]
    assert [r.input_ids_BT.tolist() for r in resumed.rollouts] == [
        r.input_ids_BT.tolist() for r in whole.rollouts[die_at // 2 :]
    ]
