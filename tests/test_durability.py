"""What a run survives: kills, signals, full disks, damaged files; and what a file cannot do."""

import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import lightning as L
import pytest
import torch
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM

from lightning_qrl.errors import UserError
from lightning_qrl.launch import find_origin, launch
from lightning_qrl.launch.checkpoints import (
    WholeCheckpoints,
    newest_first,
    newest_sound,
    read_checkpoint,
)
from lightning_qrl.launch.disk import full_disk
from lightning_qrl.policy import Policy
from lightning_qrl.recipe import load_recipe, recipe_from_yaml

QRL = [sys.executable, "-c", "from lightning_qrl.cli import main; main()"]
SMALL = [
    "trainer.accelerator=cpu",
    "grpo.prompts_per_rollout=2",
    "grpo.group_size=4",
    "callbacks.held_out_evaluation={prompts: 8, every_n_steps: 4}",
    "callbacks.sampled_completions=null",
]
IO = WholeCheckpoints()
OURS = {"recipe": "seed: 1", "recipe_name": "x", "run_id": "y"}


def contents(size: int = 500) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    weights = {f"model.{i}": torch.randn(size, generator=generator) for i in range(4)}
    return {"state_dict": weights, "global_step": 3, "lightning_qrl": OURS}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def loads_alike(file: Path, wanted: object) -> bool:
    """Whether a damaged file is refused, with its name, or holds what was written."""
    try:
        return same(read_checkpoint(file), wanted)
    except UserError as error:
        return str(error).startswith(f"checkpoint {file} is damaged")


def test_a_checkpoint_cut_short_or_altered_is_never_loaded_wrong(tmp_path):
    whole, damaged = tmp_path / "whole.ckpt", tmp_path / "damaged.ckpt"
    IO.save_checkpoint(contents(), whole)
    assert same(read_checkpoint(whole), contents())
    raw, draw = whole.read_bytes(), random.Random(0)
    for tenth in range(10):
        damaged.write_bytes(raw[: len(raw) * tenth // 10])
        with pytest.raises(UserError, match="is damaged or not written by qrl"):
            read_checkpoint(damaged)
    for _ in range(100):
        altered = bytearray(raw)
        altered[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        damaged.write_bytes(altered)
        assert loads_alike(damaged, contents())
    flipped = bytearray(raw)
    flipped[raw.index(contents()["state_dict"]["model.2"].numpy().tobytes()) + 9] ^= 1
    damaged.write_bytes(flipped)
    with pytest.raises(UserError, match="record .* is not what was written"):
        read_checkpoint(damaged)


@pytest.mark.slow
def test_every_single_bit_of_a_small_checkpoint(tmp_path):
    whole, damaged = tmp_path / "whole.ckpt", tmp_path / "damaged.ckpt"
    small = {"state_dict": {"a": torch.arange(3.0)}, "global_step": 1}
    IO.save_checkpoint(small, whole)
    raw = whole.read_bytes()
    for place in range(8 * len(raw)):
        altered = bytearray(raw)
        altered[place // 8] ^= 1 << place % 8
        damaged.write_bytes(altered)
        assert loads_alike(damaged, small), place


def test_what_was_left_aside_is_no_checkpoint_and_is_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".a.ckpt.{dead.pid}.part"
    left.write_bytes(b"half")
    alive = tmp_path / f".b.ckpt.{os.getppid()}.part"
    alive.write_bytes(b"half")
    assert newest_first(tmp_path) == []
    IO.save_checkpoint(contents(), tmp_path / "c.ckpt")
    assert not left.exists()
    assert alive.exists()
    assert newest_first(tmp_path) == [tmp_path / "c.ckpt"]


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


def test_loading_runs_no_code(tmp_path, save_policy):
    touched = tmp_path / "touched"
    torch.save({"state_dict": {}, "lightning_qrl": Evil(touched)}, tmp_path / "evil.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Evil(touched)))
    for name in ("evil.ckpt", "plain.ckpt"):
        with pytest.raises(UserError, match=f"{name} is damaged or not written by qrl"):
            find_origin(str(tmp_path / name), None)
    folder = tmp_path / "policy"
    save_policy(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil(touched)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be loaded"):
        Policy(str(folder)).build()
    assert not touched.exists()


def test_a_policy_that_brings_code_is_refused_without_asking(tmp_path, save_policy):
    folder = tmp_path / "policy"
    save_policy(folder)
    config = (folder / "config.json").read_text()
    brought = '{"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own", '
    (folder / "config.json").write_text(
        config.replace('"model_type": "qwen3",', "").replace("{", brought, 1)
    )
    (folder / "own.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')")
    with pytest.raises(UserError, match="cannot be loaded"):
        Policy(str(folder)).skeleton()
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "No space left on device (a/b)"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (RuntimeError("(sqlite3.OperationalError) database or disk is full\n[SQL]"),
         "(sqlite3.OperationalError) database or disk is full"),
        (RuntimeError("I/O error: No space left on device (os error 28)"),
         "I/O error: No space left on device (os error 28)"),
        (OSError(errno.EACCES, "Permission denied"), None),
        (ValueError("something else"), None),
    ],
)  # fmt: skip
def test_a_full_disk_is_told_from_other_errors(error, says):
    assert full_disk(error) == says
    wrapped = RuntimeError("a library's own")
    wrapped.__cause__ = error
    assert full_disk(wrapped) == says


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    return tmp_path


def recipe(*overrides: str, steps: int):
    return load_recipe("4bitter", [*SMALL, f"trainer.max_steps={steps}", *overrides])


def resume(run: str):
    origin = find_origin(run, None)
    return launch(recipe_from_yaml(origin.recipe.to_yaml(), origin.recipe.name), origin)


class Signals(L.Callback):
    """Sends this process a signal in a step."""

    def __init__(self, at: int = 0, number: int = signal.SIGTERM, times: int = 1) -> None:
        self.at, self.number, self.times = at, number, times

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step + 1 == self.at and "QRL_TEST_QUIET" not in os.environ:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


SIGNALS = "callbacks.signals._target_=qrl_test_durability.Signals"


@pytest.fixture
def signals():
    sys.modules["qrl_test_durability"] = sys.modules[Signals.__module__]


def weights(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def histories(outcome) -> dict[str, list[tuple[int, float]]]:
    client = MlflowClient(outcome.run.uri)
    keys = client.get_run(outcome.run.run_id).data.metrics
    timed = ("timing_s/", "train/step_time", "train/tokens_per_second", "system/", "peak")
    plain = [key for key in keys if not key.startswith(timed) and "memory" not in key]
    found = {k: client.get_metric_history(outcome.run.run_id, k) for k in plain}
    return {k: sorted((m.step, m.value) for m in history) for k, history in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("updates", [[], ["grpo.minibatches=2"]])
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(here, signals, monkeypatch, updates):
    given = [SIGNALS, "callbacks.signals.at=3", *updates, "callbacks.checkpoint=null"]
    stopped = launch(recipe(*given, "tracking.run_name=stopped", steps=6))
    assert (stopped.status, stopped.exit_code) == ("KILLED", 128 + signal.SIGTERM)
    saved = read_checkpoint(stopped.folder / "checkpoints" / "stopped.ckpt")
    assert saved["global_step"] == (4 if updates else 3)
    monkeypatch.setenv("QRL_TEST_QUIET", "1")
    resumed = resume("stopped")
    alone = launch(recipe(*given, "tracking.run_name=alone", steps=6))
    assert resumed.status == alone.status == "FINISHED"
    assert resumed.run.run_id == stopped.run.run_id
    assert same(weights(resumed.folder / "policy"), weights(alone.folder / "policy"))
    assert histories(resumed) == histories(alone)
    assert resumed.evaluations == alone.evaluations


def test_a_second_signal_stops_at_once(here, signals):
    given = [SIGNALS, "callbacks.signals.at=2", "callbacks.signals.times=2"]
    outcome = launch(recipe(*given, f"callbacks.signals.number={int(signal.SIGINT)}", steps=3))
    assert (outcome.status, outcome.exit_code) == ("KILLED", 130)
    assert list((outcome.folder / "checkpoints").glob("*")) == []


def test_a_damaged_newest_checkpoint_names_the_one_before(here):
    saves = ["callbacks.checkpoint.every_n_epochs=1", "callbacks.checkpoint.save_top_k=-1"]
    folder = launch(recipe(*saves, steps=3)).folder
    newest, older, _ = newest_first(folder / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.raises(UserError) as caught:
        find_origin(str(folder), None)
    assert str(caught.value).startswith(f"checkpoint {newest} is damaged")
    assert str(caught.value).endswith(f"the next older one is sound: qrl fit --resume {older}")


class SpoilsAtTheEnd(L.Callback):
    """Makes a weight NaN once nothing looks at it any more."""

    def on_train_end(self, trainer, pl_module):
        weight = pl_module.model.get_parameter("model.layers.1.mlp.up_proj.weight")
        weight.data[0, 0] = float("nan")


def test_weights_that_are_not_finite_are_no_trained_policy(here, signals):
    given = [
        "callbacks.spoils._target_=qrl_test_durability.SpoilsAtTheEnd",
        "tracking.experiment=spoilt",
    ]
    with pytest.raises(UserError) as caught:
        launch(recipe(*given, "callbacks.held_out_evaluation=null", steps=1))
    assert str(caught.value).startswith(
        "the weights are not finite after 1 optimizer steps, first model.layers.1.mlp.up_proj."
    )
    assert not list(here.glob("runs/*/policy"))
    client = MlflowClient("sqlite:///mlflow.db")
    found = client.get_experiment_by_name("spoilt")
    (run,) = client.search_runs([found.experiment_id])
    assert (run.info.status, run.data.tags["qrl.error"]) == ("FAILED", str(caught.value))
    assert "qrl.policy_sha256" not in run.data.tags


def test_a_checkpoint_with_spoilt_weights_is_not_gone_on_from(tmp_path):
    spoilt = contents()
    spoilt["state_dict"]["model.2"][7] = torch.inf
    IO.save_checkpoint(contents(), tmp_path / "older.ckpt")
    IO.save_checkpoint(spoilt, tmp_path / "newer.ckpt")
    with pytest.raises(UserError, match=r"holds weights that are not finite, first model\.2"):
        find_origin(str(tmp_path / "newer.ckpt"), None)
    assert newest_sound(newest_first(tmp_path)) == tmp_path / "older.ckpt"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("megabytes", [22, 40, 58])
def test_a_disk_that_fills(tmp_path, megabytes):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(disk)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        saves = ["callbacks.checkpoint.every_n_epochs=1", "callbacks.checkpoint.save_top_k=-1"]
        uri = f"tracking.uri=sqlite:///{tmp_path}/m.db"
        arguments = ["fit", "-r", "4bitter", *SMALL, *saves, uri, "trainer.max_steps=9"]
        done = subprocess.run(
            [*QRL, *arguments], cwd=disk, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        (line,) = [x for x in done.stderr.splitlines() if x.startswith("qrl: ")]
        assert "cannot be written: No space left on device" in line
        assert "Traceback" not in done.stderr
        files = list(disk.glob("runs/*/checkpoints/*"))
        assert all(file.suffix == ".ckpt" and read_checkpoint(file) for file in files)
        if files:
            assert (
                f"the last good checkpoint is {max(files, key=lambda f: f.stat().st_mtime)}" in line
            )
        client = MlflowClient(f"sqlite:///{tmp_path}/m.db")
        found = client.get_experiment_by_name("lightning_qrl")
        (run,) = client.search_runs([found.experiment_id])
        assert run.info.status == "FAILED"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


KILLED = """
import sys, torch
from lightning_qrl.launch.checkpoints import WholeCheckpoints
state = {f"w{i}": torch.full((200_000,), float(i)) for i in range(5)}
for step in range(10**6):
    WholeCheckpoints().save_checkpoint({"state_dict": state, "global_step": step}, sys.argv[1])
"""


@pytest.mark.slow
def test_killed_while_it_saves_the_last_checkpoint_is_whole(tmp_path):
    file, draw = tmp_path / "x.ckpt", random.Random(0)
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(file)], stderr=-3)
        before = file.stat().st_mtime_ns if file.exists() else 0
        while not file.exists() or file.stat().st_mtime_ns == before:
            time.sleep(0.01)
        time.sleep(draw.random() / 10)
        process.kill()
        process.wait()
        assert read_checkpoint(file)["global_step"] >= 0
        assert zipfile.ZipFile(file).testzip() is None
        assert newest_first(tmp_path) == [file]
    IO.save_checkpoint(contents(), file)
    assert list(tmp_path.iterdir()) == [file]
