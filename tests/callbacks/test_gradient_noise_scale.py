"""Gradient noise scale in training: by hand with autograd, resumed, refused, on two ranks."""

import os
import subprocess
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.gradient_noise_scale import GradientNoiseScale
from lightning_qrl.errors import UserError
from lightning_qrl.launch import check
from lightning_qrl.overlong import Overlong
from lightning_qrl.recipe import load_recipe

MASKED = Overlong(mask_truncated_completions=True)


class MicroBatches(L.Callback):
    """Keeps the weights of each step and its micro-batches."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            weights = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
            self.steps.append((weights, []))
        self.steps[-1][1].append(batch)

    def gradients(self, module):
        """Completions and gradient of each micro-batch, as its share of the step's."""
        found = []
        for weights, batches in self.steps:
            module.load_state_dict(weights)
            found.append([])
            for batch in batches:
                logprobs, _, *_ = module.scorer(batch, module.engine.temperature)
                loss, _ = module.loss(logprobs, batch)
                grads = torch.autograd.grad(loss, list(module.parameters()))
                flat = torch.cat([grad.flatten().double() for grad in grads])
                found[-1].append((int(batch.mask_BS.any(dim=1).sum()), flat))
        return found


def by_hand(steps, decay):
    """What is logged at each step, from all pairs of micro-batches."""
    signal = noise = weight = 0.0
    logged = []
    for parts in steps:
        samples = sum(n for n, _ in parts)
        pairs = [(a, b) for a in range(len(parts)) for b in range(len(parts)) if a != b]
        inner = sum(float(parts[a][1] @ parts[b][1]) for a, b in pairs) * samples**2
        square = inner / sum(parts[a][0] * parts[b][0] for a, b in pairs)  # E x_i x_j = |G|^2
        total = sum(flat for _, flat in parts)
        spread = samples * (float(total @ total) - square)  # E |g|^2 = |G|^2 + tr / C
        signal = decay * signal + (1 - decay) * square
        noise = decay * noise + (1 - decay) * spread
        weight = decay * weight + 1 - decay
        values = {"gradient_noise/signal": signal / weight, "gradient_noise/noise": noise / weight}
        if signal > 0:
            values["gradient_noise_scale"] = noise / signal
        logged.append({f"train/{name}": value for name, value in values.items()})
    return logged


def records(recorder):
    return [(step, m) for step, m in recorder.records if any("gradient_noise" in k for k in m)]


@pytest.mark.parametrize("options", [{}, {"minibatches": 2, "options": {"overlong": MASKED}}])
def test_it_is_what_autograd_gives_for_each_micro_batch(train, recorder, options):
    seen = MicroBatches()
    module = train(4, GradientNoiseScale(0.5), seen, micro_batches=3, gradient_clip_val=0.01,
                   **options)  # fmt: skip
    gradients = seen.gradients(module)
    assert [len(step) for step in gradients] == [3] * 4
    sizes = {samples for step in gradients for samples, _ in step}
    assert (len(sizes) > 1) == bool(options)  # truncated completions do not count
    expected = by_hand(gradients, 0.5)
    assert [step for step, _ in records(recorder)] == [1, 2, 3, 4]
    for (_, metrics), values in zip(records(recorder), expected, strict=True):
        assert metrics == pytest.approx(values, rel=1e-3)
    assert any("train/gradient_noise_scale" in metrics for _, metrics in records(recorder))


def test_a_resumed_run_goes_on_with_the_average(train, recorder, tmp_path):
    every = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)
    train(4, GradientNoiseScale(), every, micro_batches=2)
    whole = records(recorder)
    recorder.records.clear()
    train(4, GradientNoiseScale(), micro_batches=2, ckpt_path=tmp_path / "step=2.ckpt")
    assert records(recorder) == whole[2:]
    assert [step for step, _ in whole] == [1, 2, 3, 4]


def test_measuring_changes_nothing_and_leaves_no_hook(train):
    module = train(2, GradientNoiseScale(), micro_batches=2)
    other = train(2, micro_batches=2).state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in module.state_dict().items())
    assert not any(p._backward_hooks for p in module.parameters())


def test_a_step_without_gradient_has_no_scale(train, recorder, parity, monkeypatch):
    monkeypatch.setattr(parity, "reward", lambda prompt, completion: 1.0)
    train(1, GradientNoiseScale(), micro_batches=2)
    [(_, metrics)] = records(recorder)
    assert metrics == {"train/gradient_noise/signal": 0.0, "train/gradient_noise/noise": 0.0}


def test_one_micro_batch_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("base", ["callbacks.gradient_noise_scale={}"])
    with pytest.raises(UserError, match="set trainer.accumulate_grad_batches to at least 2"):
        check(recipe)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="noise scale compares micro-batches"):
        GradientNoiseScale().setup(L.Trainer(accelerator="cpu", logger=False), None, "fit")


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_bad_arguments(decay):
    with pytest.raises(ValueError, match="decay must be at least 0 and below 1"):
        GradientNoiseScale(decay)


RANKS = """
import sys
import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader
from callbacks.gradient_noise_scale import GradientNoiseScale
from lightning_qrl.experience import split_for_updates
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.tasks.arithmetic import Arithmetic

folder, experience, devices, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

class Data(L.LightningDataModule):
    def train_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        assert world == devices
        e = torch.load(experience, weights_only=False)
        mine = e.take(torch.arange(len(e)).chunk(world)[rank])
        parts = split_for_updates(mine, [torch.arange(len(mine))], 4 // world, world)
        return DataLoader(parts, batch_size=None)

class Record(DummyLogger):
    def log_metrics(self, metrics, step=None):
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        found = {k: v for k, v in metrics.items() if "gradient_noise" in k}
        if found:
            torch.save(found, out)

policy = Policy(folder)
engine = Embedded(eos_id=policy.eos_id, pad_id=policy.pad_id)
module = GRPOModule(policy=policy, task=Arithmetic(1), engine=engine, optimizer=AdamWSettings())
L.Trainer(
    max_steps=1, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto",
    accumulate_grad_batches=4 // devices, logger=Record(), enable_checkpointing=False,
    enable_progress_bar=False, use_distributed_sampler=False, log_every_n_steps=1,
    callbacks=[GradientNoiseScale()],
).fit(module, Data())
"""


@pytest.mark.slow
def test_two_ranks_estimate_what_one_does(tmp_path, tiny_policy, ragged):
    script, data = tmp_path / "ranks.py", tmp_path / "experience.pt"
    script.write_text(RANKS)
    torch.save(ragged(0), data)
    found = []
    for devices in (1, 2):
        out = tmp_path / f"{devices}.pt"
        command = [sys.executable, script, tiny_policy.name, data, str(devices), out]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(torch.load(out))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0]["train/gradient_noise/noise"] > 0
