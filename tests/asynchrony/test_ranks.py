"""Two ranks: each has its own queue, and all of them survive a checkpoint."""

import os
import subprocess
import sys

import pytest
import torch

TRAIN = """
import sys
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.conftest import Parity
from tests.helpers.grpo_parts import data_of, module_of
from lightning_qrl.asynchrony.settings import Asynchrony
from lightning_qrl.policy import Policy

name, folder, start = sys.argv[1:]
knobs = Asynchrony(
    max_staleness=3, queue_depth=1, samplers=4, in_flight_update=True,
    completion_time=1.0, completion_time_spread=0.8,
)
task = Parity()
module = module_of(Policy(name), task)
data = data_of(task, prompts_per_rollout=4, asynchrony=knobs)
trainer = L.Trainer(
    max_steps=6, accelerator="cpu", devices=2, strategy="ddp", logger=False,
    callbacks=[ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_epochs=1,
                               save_on_train_epoch_end=True)],
    enable_progress_bar=False, use_distributed_sampler=False, reload_dataloaders_every_n_epochs=1,
)
trainer.fit(module, data, ckpt_path=None if start == "new" else f"{folder}/step={start}.ckpt")
rows = [(r.input_ids_BT, r.logprobs_BS, r.versions_BS) for r in module.rollouts]
torch.save((rows, module.model.state_dict()), f"{folder}/{start}-{trainer.global_rank}.pt")
"""


@pytest.mark.slow
def test_two_ranks_go_on_where_they_were(tmp_path, tiny_policy, request):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(request.config.rootpath)}
    for start in ("new", "3"):
        command = [sys.executable, script, tiny_policy.name, tmp_path, start]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        (whole, weights), (resumed, again) = (
            torch.load(tmp_path / f"{start}-{rank}.pt") for start in ("new", "3")
        )
        assert len(whole) == 6
        assert len(resumed) == 3
        for once, now in zip(whole[3:], resumed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(once, now, strict=True))
        assert all(torch.equal(again[key], weights[key]) for key in weights)
    own, others = (torch.load(tmp_path / f"new-{rank}.pt")[0] for rank in (0, 1))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(own, others, strict=True))
