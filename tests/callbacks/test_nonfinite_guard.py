"""The guard: what is not finite reaches no weight; where it began is named."""

import re
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from callbacks.fp16 import FP16
from callbacks.nonfinite_guard import NonfiniteGuard
from lightning_qrl.analysis.nonfinite import first_nonfinite
from lightning_qrl.errors import UserError

LAYER = "model.layers.1.mlp.up_proj"


class Spoils(L.Callback):
    """Makes numbers of a layer or of the loss NaN, in the steps that it is told."""

    def __init__(self, what: str, *steps: int, factor: float = float("nan")) -> None:
        self.what, self.steps, self.factor = what, steps, factor

    def setup(self, trainer, pl_module, stage):
        self.trainer, self.module = trainer, pl_module

    def on_train_start(self, trainer, pl_module):
        layer = pl_module.model.get_submodule(LAYER)
        if self.what == "output":
            layer.register_forward_hook(lambda m, i, out: out * self.now(m.training))
        if self.what == "gradient":
            layer.register_full_backward_hook(lambda m, g, out: (g[0] * self.now(),))
        if self.what == "loss":
            plain = pl_module.loss_of
            pl_module.loss_of = lambda batch: (plain(batch)[0] * self.now(), plain(batch)[1])

    def on_after_backward(self, trainer, pl_module):
        if self.what == "grad":  # which leaves no trace in the backward
            pl_module.model.get_submodule(LAYER).weight.grad.mul_(self.now())

    def now(self, training=True):
        due = training and self.trainer.global_step + 1 in self.steps
        return self.factor if due else 1.0


class SpoilsWeights(L.Callback):
    """Makes a weight NaN when a phase ends, after every other callback."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_step in self.steps:
            pl_module.model.get_submodule(LAYER).weight.data[0, 0] = float("nan")


class Keeps(L.Callback):
    """Keeps the weights and the optimizer's state after each step."""

    def __init__(self):
        self.after = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        state = trainer.optimizers[0].state_dict()["state"]
        kept = [p.detach().clone() for p in pl_module.parameters()]
        kept += [t.clone() for each in state.values() for t in each.values()]
        self.after[trainer.global_step] = kept


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("output", f"the loss is not finite, first the output of {LAYER}"),
        ("gradient", f"the gradient is not finite, first the gradient of {LAYER}"),
        ("loss", "the loss is not finite, first the loss, of finite outputs"),
        ("grad", f"the gradient is not finite, first that of {LAYER}.weight"),
    ],
)
def test_stop_names_step_and_layer(train, what, says):
    with pytest.raises(UserError) as caught:
        train(4, Spoils(what, 3), NonfiniteGuard())
    assert str(caught.value).startswith(f"nonfinite_guard: step 3: {says}; ")
    assert "no checkpoint to go on from" in str(caught.value)


@pytest.mark.parametrize("what", ["output", "gradient", "loss"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_skipped_step_moves_nothing(train, recorder, capfd, what, micro_batches):
    keeps = Keeps()
    train(4, Spoils(what, 3), NonfiniteGuard("skip"), keeps, micro_batches=micro_batches)
    assert same(keeps.after[2], keeps.after[3])
    assert not same(keeps.after[3], keeps.after[4])
    assert all(t.isfinite().all() for t in keeps.after[4])
    counts = [
        m["train/nonfinite_steps"] for _, m in recorder.records if "train/nonfinite_steps" in m
    ]
    assert counts == [0, 0, 1, 1]
    (note,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("note: ")]
    assert re.fullmatch(r"note: step 3: the (loss|gradient) is not finite, first .*; skipped", note)
    assert not recorder.steps[2]["train/grad_norm"] < float("inf")


def test_the_guard_changes_nothing_where_all_is_finite(train):
    plain, guarded = Keeps(), Keeps()
    train(3, plain)
    train(3, NonfiniteGuard(), guarded)
    assert all(same(plain.after[step], guarded.after[step]) for step in (1, 2, 3))


def test_patience_ends_a_run_that_skips(train):
    with pytest.raises(UserError, match="step 4: the loss is not finite"):
        train(9, Spoils("output", 1, 3, 4), NonfiniteGuard("skip", patience=2))


def test_a_norm_that_is_too_large_counts_alike(train):
    keeps = Keeps()
    guard = NonfiniteGuard("skip", largest_norm=1e4)
    train(3, Spoils("loss", 2, factor=1e9), guard, keeps)
    assert same(keeps.after[1], keeps.after[2])
    with pytest.raises(UserError, match=r"step 2: the gradient's norm is \S+, \S+weight has"):
        train(3, Spoils("loss", 2, factor=1e9), NonfiniteGuard(largest_norm=1e4))


def test_an_overflow_under_loss_scaling_is_the_scalers(train):
    keeps, scales = Keeps(), FP16(initial_scale=2.0**120)
    train(2, scales, NonfiniteGuard(), keeps)
    assert scales.scaling.skipped == 2
    with pytest.raises(UserError, match="the loss is not finite"):
        train(2, FP16(), Spoils("loss", 2), NonfiniteGuard())


def saving(folder: Path, phases: int = 2) -> L.pytorch.callbacks.ModelCheckpoint:
    return L.pytorch.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_epochs=phases, save_on_train_epoch_end=True, save_top_k=-1
    )


def test_restore_takes_weights_and_moments_of_the_newest_checkpoint(train, tmp_path):
    keeps = Keeps()
    guard, options = NonfiniteGuard("restore"), {"minibatches": 2}
    module = train(12, Spoils("output", 9), guard, keeps, saving(tmp_path), **options)
    # phases of 2 steps, checkpoints at 4 and 8; step 9 is bad, 10 is withheld, 11 is from 8
    assert same(keeps.after[8], keeps.after[10])
    assert not same(keeps.after[10], keeps.after[11])
    assert module.trainer.global_step == 12
    keeps = Keeps()
    train(
        8, Spoils("output", 7), NonfiniteGuard("restore"), keeps, saving(tmp_path / "b"), **options
    )
    saved = torch.load(tmp_path / "b" / "step=8.ckpt", weights_only=True)["state_dict"]
    older = torch.load(tmp_path / "b" / "step=4.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], older[name]) for name in older)


SAMPLER = "the policy's logits are not finite after 2 optimizer steps, first the weight of " + LAYER


@pytest.mark.parametrize("what", ["stop", "skip", None])
def test_weights_that_the_sampler_finds_spoilt_end_the_run_with_the_layer(train, what):
    guard = [] if what is None else [NonfiniteGuard(what)]
    with pytest.raises(UserError, match=re.escape(SAMPLER)):
        train(4, *guard, SpoilsWeights(2))


def test_weights_that_the_sampler_finds_spoilt_are_restored(train, tmp_path, capfd):
    keeps = Keeps()
    train(6, NonfiniteGuard("restore"), saving(tmp_path), SpoilsWeights(5), keeps)
    assert all(t.isfinite().all() for t in keeps.after[6])
    (note,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("note: ")]
    assert note.startswith(f"note: {SAMPLER.replace('2 opt', '5 opt')}; {tmp_path}/step=4.ckpt is")


class Damages(L.Callback):
    """Cuts the newest checkpoint short, and spoils the weights in the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 6:
            (self.folder / "step=6.ckpt").write_bytes(b"cut")
            saved = torch.load(self.folder / "step=4.ckpt", weights_only=True)
            saved["state_dict"][f"model.{LAYER}.weight"][0, 0] = torch.nan
            torch.save(saved, self.folder / "step=4.ckpt")


def test_restore_passes_over_checkpoints_that_are_not_sound(train, tmp_path, recorder, capfd):
    spoils = Spoils("output", 7), Damages(tmp_path)
    train(8, *spoils, NonfiniteGuard("restore"), saving(tmp_path, 1), minibatches=2)
    (note,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("note: ")]
    assert f"checkpoint {tmp_path}/step=6.ckpt is damaged" in note
    assert f"step=4.ckpt holds weights that are not finite, first model.{LAYER}.weight" in note
    assert note.endswith(f"{tmp_path}/step=2.ckpt is restored, steps count on")
    named = "train/nonfinite_steps"
    counts = [m[named] for _, m in recorder.records if named in m]
    assert counts == [0, 0, 0, 0, 0, 0, 1, 2]  # step 8 was withheld


def test_restore_without_a_checkpoint(train, tmp_path):
    with pytest.raises(UserError, match="needs a ModelCheckpoint"):
        train(2, NonfiniteGuard("restore"))
    with pytest.raises(UserError, match="no checkpoint to go on from"):
        train(4, Spoils("loss", 2), NonfiniteGuard("restore"), saving(tmp_path))


@pytest.mark.parametrize(
    ("what", "index", "says"),
    [
        ("weight", 2, "the weight of 2"),
        ("input", 0, "the loss, of finite outputs"),
        (None, 0, None),
    ],
)
def test_the_first_of_a_chain(what, index, says):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    x = torch.ones(2, 3)
    if what == "weight":
        model[index].weight.data[0, 0] = torch.inf
    scale = torch.tensor(torch.nan if what == "input" else 1.0)
    assert first_nonfinite(model, [lambda: model(x).sum() * scale]) == says
    assert all(p.grad is None for p in model.parameters())


def test_arguments_are_checked():
    for wrong in ({"patience": 0}, {"largest_norm": 0.0}, {"largest_norm": float("inf")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            NonfiniteGuard(**wrong)
