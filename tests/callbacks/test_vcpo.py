"""VCPO's learning rate: scaled by the effective sample size for the step, and for no one else."""

import math

import lightning as L
import pytest
import torch
from grpo_parts import G, data_of, module_of

from callbacks.fp16 import FP16
from callbacks.truncated_importance_sampling import TruncatedImportanceSampling
from callbacks.vcpo import VCPO
from lightning_qrl.errors import UserError
from lightning_qrl.optimizer import AdamWSettings


class Drifting(L.Callback):
    """Makes the sampler another policy than the trainer: moves the weights after the rollout."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not batch_idx:
            g = torch.Generator().manual_seed(trainer.global_step)
            with torch.no_grad():
                for p in pl_module.parameters():
                    p += 0.02 * torch.randn(p.shape, generator=g)


class Rates(L.Callback):
    """Keeps learning rates between steps, and the largest change of a weight in the first one."""

    def __init__(self):
        self.between, self.moved, self.before = [], 0.0, []

    def on_before_backward(self, trainer, pl_module, loss):
        self.before = self.before or [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer, pl_module, *_):
        pairs = zip(pl_module.parameters(), self.before, strict=True)
        self.moved = self.moved or max(float((p.detach() - old).abs().max()) for p, old in pairs)
        self.between.append([g["lr"] for g in trainer.optimizers[0].param_groups])


@pytest.mark.parametrize("rule", ["sqrt", "linear"])
def test_the_step_is_taken_with_the_scaled_rate_which_is_logged_and_gone_after_it(
    rule, train, recorder
):
    rates = Rates()
    train(3, Drifting(), VCPO(rule=rule, base=0.9), rates)
    assert rates.between == [[1e-3, 1e-3]] * 3
    for metrics in recorder.steps:
        share = min(1.0, metrics["rollout_corr/ess_seq"] / 0.9)
        scale = math.sqrt(share) if rule == "sqrt" else share
        assert 0.05 < scale < 0.999
        assert metrics["rollout_corr/vcpo_lr_scale"] == pytest.approx(scale)
        assert metrics["train/learning_rate"] == pytest.approx(1e-3 * scale)
    # AdamW's first step moves each weight by the learning rate, or a little less
    assert rates.moved == pytest.approx(recorder.steps[0]["train/learning_rate"], rel=1e-3)


def test_the_effective_sample_size_is_that_of_the_whole_step(train, recorder):
    train(2, Drifting(), VCPO(baseline=False))
    whole = [m["rollout_corr/vcpo_lr_scale"] for m in recorder.steps]
    recorder.records.clear()
    train(2, Drifting(), VCPO(baseline=False), micro_batches=4)
    parts = [m["rollout_corr/vcpo_lr_scale"] for m in recorder.steps]
    assert whole == pytest.approx(parts, rel=1e-3)


def test_a_schedule_goes_on_from_the_unscaled_rate(train, recorder):
    settings = AdamWSettings(lr=1e-3, schedule="linear")
    rates = Rates()
    train(3, Drifting(), VCPO(), rates, options={"optimizer": settings})
    assert [r[0] for r in rates.between] == pytest.approx([1e-3 * 2 / 3, 1e-3 / 3, 0.0])
    for number, metrics in enumerate(recorder.steps):
        due = 1e-3 * (3 - number) / 3
        scale = metrics["rollout_corr/vcpo_lr_scale"]
        assert metrics["train/learning_rate"] == pytest.approx(due * scale)


def test_checkpoints_hold_the_unscaled_rate(train, tmp_path):
    saving = L.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, save_on_train_epoch_end=True)
    train(1, Drifting(), VCPO(), saving)
    (path,) = tmp_path.glob("*.ckpt")
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert [group["lr"] for group in saved] == [1e-3, 1e-3]


def test_where_sampler_and_trainer_agree_nothing_is_scaled(train, recorder):
    train(2, VCPO(baseline=False))
    for metrics in recorder.steps:
        assert metrics["rollout_corr/vcpo_lr_scale"] == pytest.approx(1.0, abs=1e-9)


def test_a_step_in_which_nothing_counts_keeps_its_rate():
    assert VCPO().scale(0.0) == 1.0


@pytest.mark.parametrize("bad", [{"base": 0.0}, {"base": 1.5}, {"rule": "cubic"}])
def test_bad_options(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} must be"):
        VCPO(**bad)


@pytest.mark.parametrize("cut", [{"minibatches": 2}, {"micro_batches": 2}, {"leverage": 0.9}])
def test_cut_groups_are_refused_for_the_baseline_alone(cut, tiny_policy, parity, fit):
    micro = {"accumulate_grad_batches": cut.get("micro_batches", 1)}

    def start(callback):
        module, data = module_of(tiny_policy, parity), data_of(parity, **cut)  # three prompts
        assert module.group_size == G
        fit(module, data, 1, callbacks=[callback], **micro)

    with pytest.raises(UserError, match=r"callbacks\.vcpo\.baseline: it needs whole groups"):
        start(VCPO())
    start(VCPO(baseline=False))


def test_the_papers_three_parts_together(train, recorder):
    train(2, Drifting(), VCPO(), TruncatedImportanceSampling("sequence", 8.0))
    for metrics in recorder.steps:
        assert metrics["rollout_corr/rollout_is_eff_sample_size"] > 0
        assert math.isfinite(metrics["train/grad_norm"])


def test_a_step_that_loss_scaling_skips_leaves_the_schedules_rate(train, recorder):
    rates, fp16 = Rates(), FP16(initial_scale=2.0**60)
    train(2, Drifting(), VCPO(), rates, fp16)
    assert fp16.scaling.skipped == 2
    assert rates.between == [[1e-3, 1e-3]] * 2
    assert all(m["rollout_corr/vcpo_lr_scale"] < 1 for m in recorder.steps)
