"""Bad input through the console script: one line on stderr, exit code 2, nothing left behind."""

import json
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from refusals import refusal

from lightning_qrl import cli

RANDOM = "policy.init=random"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "file").write_text("a regular file")
    return tmp_path


@pytest.fixture
def refused(here, monkeypatch, capfd):
    return refusal(here, monkeypatch, capfd)


FIT = ["fit", "--recipe", "4bitter.yaml", RANDOM]
OVERRIDES = [
    ("grpo.group_size=1", "grpo: group_size must be at least 2"),
    ("rollout.max_staleness=-1", "rollout: max_staleness must be"),
    ("callbacks.bf16_tail.fraction=1.5", "callbacks.bf16_tail: fraction must be 0 to 1"),
    ("callbacks.forward_quantization.format=nvfp", "unknown number format 'nvfp'"),
    ("callbacks.forward_quantization.block=[16,16]", "spans rows, so it excludes outer_scale=row"),
    ("callbacks.forward_quantization.weight=nvfp4", "forward_quantization.weight: "),
    ("callbacks.forward_quantization={format: nvfp4, weight: none, activation: none}", "both none"),
    ("callbacks.sensitive_weights.select=[nothing]", "matches no linear layer"),
    ("callbacks.quantized_backward.format=nvfp4", "dequantized_backward and quantized_backward"),
    ("grpo.grup_size=4", "grpo.grup_size: no such key; did you mean group_size"),
    ("callbacks.checkpoint.filenme=x", "no such key; did you mean filename?"),
    ("trainer.max_step=3", "did you mean max_steps"),
    ("tracking.expriment=x", "tracking.expriment: no such key; did you mean experiment?"),
    ("tracking.experiment=", "tracking.experiment: Input should be a valid string, got None"),
    ("tracking.experiment=' '", "tracking: experiment and run_name must not be empty"),
    ("tracking.folder=file/runs", "file/runs cannot be written"),
    ("tracking.folder=/proc/x", "output folder /proc/x cannot be written"),
    ("tracking.uri=ftp://x/y", "MLflow at ftp://x/y: "),
    ("tracking.uri=sqlite:///file", "the file is no sqlite database"),
    ("optimizer.schedule=nothing", "optimizer: "),
    ("trainer.precision=nonsense", "trainer.precision: Input should be"),
    ("trainer.precision=64-true", "trainer.precision: expected one of 32-true"),
    ("trainer.accelerator=nonsense", "trainer: "),
    ("trainer.strategy=nonsense", "trainer: "),
    ("trainer.devices=0", "trainer: "),
    ("trainer.max_time=soon", "trainer: "),
    ("grpo.prompts_per_rollout=7 ", "do not divide"),
    ("seed=-1", "seed: expected an integer"),
    ("callbacks.forward_quantization.where=*.down_proj", "needs quotes of its own"),
    ("not an override", "command line: 'not an override' is no override"),
    ("policy.name=~nosuchuser/x", "policy ~nosuchuser/x: there is no such folder"),
    ("trainer.accelerator=tpu", "trainer: "),
    ("trainer.strategy=xla", "trainer: "),
    ("trainer.precision=transformer-engine", "trainer"),
    ("trainer.profiler=xla", "trainer.profiler: "),
    ("trainer.max_time='99999999999:00:00:00'", "trainer: OverflowError: "),
    (
        "optimizer.schedule=reduce_lr_on_plateau",
        "there is no schedule reduce_lr_on_plateau by step",
    ),
    ("grpo.clip_high=1e300", "clip_high at least 0 and at most 1e+09"),
    ("rollout.temperature=1e-40", "temperature must be above 0, from 1e-06"),
    ("grpo.group_size=1000000000000", "completions a rollout"),
    ("policy.name=/nowhere/at/all", "policy /nowhere/at/all: there is no such folder"),
]


@pytest.mark.parametrize(("override", "says"), OVERRIDES)
def test_an_override(refused, override, says):
    minibatches = ["grpo.minibatches=5"] if "prompts_per_rollout" in override else []
    assert says in refused(*FIT, override.strip(), *minibatches)


REPLAY = "callbacks.router_replay={}"


def test_router_replay_of_a_dense_policy(refused):
    message = refused("fit", "-r", "base", RANDOM, REPLAY)
    assert message == (
        "callbacks.router_replay: policy embedded: it is dense, so there is no choice of experts "
        "to replay; take router_replay out"
    )


def test_router_replay_without_rollouts(refused):
    message = refused("fit", "-r", "warmup_moe", REPLAY)
    assert message == (
        "callbacks.router_replay: only GRPO has rollouts whose routes could be replayed"
    )


NOISE = "callbacks.adaptive_quantization_noise={}"
RANKS = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu"]
CONTRADICTIONS = [
    ("warmup", [NOISE], "callbacks.adaptive_quantization_noise: only GRPO has rollouts"),
    ("base", [NOISE, "trainer.max_steps=9"], "trainer.max_steps=9 is less than its stages=10"),
    (
        "base",
        [*RANKS, "rollout.max_staleness=2", "rollout.completion_time=1.0", "rollout.samplers=33"],
        "samplers=33 does not divide into 2 ranks",
    ),
    (
        "base",
        [*RANKS, "callbacks.vcpo={}", "grpo.prompts_per_rollout=2"]
        + ["trainer.accumulate_grad_batches=2"],
        "callbacks.vcpo.baseline: it needs whole groups",
    ),
    (
        "base",
        ["rollout.max_staleness=4", "rollout.completion_time=1.0e+308"],
        "completion_time must be at least 0 and at most 1000000",
    ),
]


@pytest.mark.parametrize(("recipe", "overrides", "says"), CONTRADICTIONS)
def test_what_does_not_go_together(refused, recipe, overrides, says):
    assert says in refused("fit", "-r", recipe, RANDOM, *overrides)


@pytest.mark.parametrize("command", [["plan", "-r"], ["recipes", "validate"]])
def test_the_commands_that_only_look_ask_for_a_trainer_too(refused, command):
    half = ["callbacks.fp16={}", "trainer.precision=bf16-mixed"]
    assert "callbacks.fp16: emulates FP16 on FP32" in refused(*command, "base", *half)
    assert "trainer.precision: expected" in refused(*command, "base", "trainer.precision=64-true")


@pytest.mark.parametrize(
    "command", [["fit", "--dry-run", "-r"], ["plan", "-r"], ["recipes", "validate"]]
)
def test_the_commands_that_only_look_find_it_too(refused, command):
    assert "fraction must be" in refused(*command, "4bitter", "callbacks.bf16_tail.fraction=2")
    near = "recipe 4biter not found; did you mean 4bitter or 4bitter_moe or 4bitter_async?"
    assert near in refused(*command, "4biter")


def test_neither_recipe_nor_run(refused):
    assert (
        refused("fit") == "give --recipe, or --resume to continue a run, or --rerun to repeat one"
    )


def test_an_unknown_callback_to_leave_out(refused):
    assert "--without bf16_tial: no such callback" in refused(*FIT, "--without", "bf16_tial")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is asked for")
def test_a_gpu_that_is_not_there(refused):
    assert refused(*FIT, "trainer.accelerator=cuda").startswith("trainer: ")


def test_a_policy_folder_without_weights(refused, here, tiny_policy):
    shutil.copytree(tiny_policy.name, here / "policy")
    (here / "policy" / "model.safetensors").unlink()
    message = refused("fit", "-r", "base", "policy.name=policy")
    assert message.startswith("policy folder policy has no weights")


def test_a_damaged_tokenizer(refused, here, tiny_policy):
    shutil.copytree(tiny_policy.name, here / "policy")
    (here / "policy" / "tokenizer.json").write_text("{")
    assert "policy" in refused("fit", "-r", "base", "policy.name=policy")


@pytest.mark.parametrize("text", ["{", '{"model_type": "no_such_model"}', ""])
def test_a_damaged_configuration(refused, here, tiny_policy, text):
    shutil.copytree(tiny_policy.name, here / "policy")
    (here / "policy" / "config.json").write_text(text)
    assert "policy" in refused("fit", "-r", "base", "policy.name=policy")


@pytest.mark.parametrize("size", ["x", -5])
def test_a_configuration_that_describes_no_model(refused, here, tiny_policy, size):
    shutil.copytree(tiny_policy.name, here / "policy")
    file = here / "policy" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": size}))
    message = refused("fit", "-r", "base", "policy.name=./policy")
    assert message.startswith("policy ./policy cannot be loaded: ")
    assert str(size) in message


def test_a_long_value_is_shortened(refused):
    message = refused("fit", "-r", "base", f"policy.name={'x' * 5000}")
    assert message.startswith("policy xxx")
    assert "cannot be loaded" in message
    assert len(message) < 1000


FAILS = """
import lightning as L

class Fails(L.Callback):
    def __init__(self, early: bool = False):
        self.early = early
        if early:
            raise LookupError("no such thing")

    def on_train_start(self, *args):
        raise LookupError("no such thing\\nat all")
"""


def test_whatever_a_constructor_raises_names_its_key(refused, here, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the import is ours, not the run's
    (here / "own_fails.py").write_text(FAILS)
    message = refused(*FIT, "callbacks.x={_target_: own_fails.Fails, early: true}")
    assert message == "command line: callbacks.x: LookupError: no such thing"


def test_what_fails_in_a_run_is_one_line_and_its_traceback_a_file(here, monkeypatch, capfd):
    (here / "own_fails.py").write_text(FAILS)
    small = ["grpo.prompts_per_rollout=2", "grpo.group_size=4", "callbacks.live_view=null",
             "callbacks.held_out_evaluation=null", "trainer.accelerator=cpu"]  # fmt: skip
    given = [*small, "callbacks.x._target_=own_fails.Fails", "tracking.run_name=r"]
    monkeypatch.setattr(sys, "argv", ["qrl", "fit", "-r", "base", RANDOM, *given])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("qrl: ")]
    (file,) = here.glob("runs/*/artifacts/error.txt")
    says = "LookupError: no such thing (raised in callbacks.x)"
    assert line == f"qrl: run r: {says}; traceback: {file}"
    text = file.read_text()
    assert text.startswith("Traceback")
    assert text.rstrip().endswith("raised in callbacks.x")
    client = MlflowClient(f"sqlite:///{here}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "lightning_qrl"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.tags["qrl.error"]) == (
        "FAILED", "LookupError: no such thing",
    )  # fmt: skip
    assert "error.txt" in [a.path for a in client.list_artifacts(run.info.run_id)]


@pytest.mark.parametrize("from_environment", [True, False])
def test_an_mlflow_server_that_is_not_there(refused, monkeypatch, from_environment):
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
    if from_environment:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    override = [] if from_environment else [f"tracking.uri={uri}"]
    assert refused(*FIT, *override).startswith(f"MLflow at {uri} does not answer")


def test_an_mlflow_server_that_never_answers(refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.perf_counter()
        assert "does not answer" in refused(
            *FIT, f"tracking.uri=http://127.0.0.1:{server.getsockname()[1]}"
        )
    assert time.perf_counter() - began < 10


def test_a_run_to_resume_that_is_not_there(refused):
    assert refused("fit", "--resume", "nothing").startswith("no run nothing: there is no mlflow.db")
    assert refused("fit", "--resume", "x.ckpt") == "checkpoint x.ckpt: there is no such file"
    assert refused("fit", "--resume", ".").endswith("start it again: qrl fit --rerun .")


def test_a_checkpoint_that_is_none_of_ours(refused, here):
    for name, content in (("text.ckpt", b"text"), ("empty.ckpt", b"")):
        (here / name).write_bytes(content)
    torch.save({"state_dict": {}}, here / "foreign.ckpt")
    torch.save([1], here / "list.ckpt")
    torch.save({"lightning_qrl": 5}, here / "five.ckpt")
    torch.save({"lightning_qrl": {"recipe": "a: [", "recipe_name": "x", "run_id": "y"},
                "state_dict": {}, "global_step": 1}, here / "recipe.ckpt")  # fmt: skip
    torch.save(torch.nn.Linear(1, 1), here / "pickle.ckpt")
    for file in sorted(here.glob("*.ckpt")):
        message = refused("fit", "--resume", file.name)
        assert message.startswith(f"checkpoint {file.name} is damaged or not written by qrl: ")


def test_a_truncated_checkpoint(refused, here):
    state = {"model.x": torch.randn(1000, 100)}
    ours = {"recipe": "seed: 1", "recipe_name": "x", "run_id": "y"}
    whole = here / "whole.ckpt"
    torch.save({"lightning_qrl": ours, "state_dict": state, "global_step": 1}, whole)
    content = whole.read_bytes()
    for share in (0.0001, 0.01, 0.5, 0.9, 0.99, 0.9999):
        (here / "cut.ckpt").write_bytes(content[: int(share * len(content))])
        assert "is damaged or not written by qrl" in refused("fit", "--resume", "cut.ckpt")


def test_an_unknown_option_is_the_usual_usage_error(here, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["qrl", "fit", "--nothing"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "No such option" in capfd.readouterr().err
