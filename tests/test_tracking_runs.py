"""What a real run leaves in MLflow: what it came from, what became of it, and its log."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType
from mlflow_server import Server
from transformers import AutoModelForCausalLM

from lightning_qrl.errors import UserError
from lightning_qrl.launch import launch
from lightning_qrl.policy import weights_sha256
from lightning_qrl.recipe import load_recipe

DOCS = Path(__file__).parent.parent / "docs" / "metrics.md"
QRL = [sys.executable, "-c", "from lightning_qrl.cli import main; main()"]
SMALL = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "grpo.prompts_per_rollout=2",
    "grpo.group_size=4",
    "callbacks.held_out_evaluation.prompts=8",
    "callbacks.live_view.every_n_steps=1",
]


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, uri) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return tmp_path


def log_of(uri: str, run_id: str) -> list[str]:
    file = MlflowClient(uri).download_artifacts(run_id, "live_view.log")
    return Path(file).read_text().splitlines()


def test_a_run_can_be_found_trusted_and_loaded(uri, capsys):
    outcome = launch(load_recipe("4bitter", SMALL))
    run = MlflowClient(uri).get_run(outcome.run.run_id)
    (output,) = run.outputs.model_outputs
    assert output.step == 2
    folder = mlflow.artifacts.download_artifacts(f"models:/{output.model_id}")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert weights_sha256(model) == run.data.tags["qrl.policy_sha256"]
    recorded = {m.key: m.value for m in MlflowClient(uri).get_logged_model(output.model_id).metrics}
    assert recorded == {
        "eval/reward": outcome.evaluations[2]["reward"],
        "eval/solved": outcome.evaluations[2]["solved"],
    }
    inputs = {i.dataset.name: i.tags[0].value for i in run.inputs.dataset_inputs}
    assert inputs == {"arithmetic/train": "train", "arithmetic/held_out": "held_out"}
    shown = capsys.readouterr().out.splitlines()
    lines = log_of(uri, outcome.run.run_id)
    assert lines == [line for line in shown if line]
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/2", "2/2"]
    memory = run.data.metrics["perf/max_memory_rss_gb"]
    assert 0.1 < memory < 100
    documented = {
        name.replace("gpu_N", "gpu_0")
        for name in re.findall(r"`((?:system|perf)/\w+)`", DOCS.read_text())
    }
    logged = {key for key in run.data.metrics if key.startswith(("system/", "perf/"))}
    of_gpus = {name for name in documented if "gpu" in name or "allocated" in name}
    assert documented - of_gpus <= logged <= documented
    assert not (outcome.folder / "outbox.jsonl").exists()


class Stops(L.Callback):
    """Ends the run in its first step, by an exception or a signal."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, *args: object) -> None:
        if self.how == "raises":
            raise RuntimeError("broken on purpose\nin two lines")
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("how", "status"), [("raises", "FAILED"), ("killed", "KILLED")])
def test_a_run_that_does_not_finish_keeps_its_log_and_its_error(uri, how, status):
    sys.modules["qrl_test_tracking_runs"] = sys.modules[Stops.__module__]
    stop = f"callbacks.stop={{_target_: qrl_test_tracking_runs.Stops, how: {how}}}"
    recipe = load_recipe("base", [*SMALL, stop, f"tracking.experiment={how}"])
    if how == "raises":
        with pytest.raises(UserError, match="RuntimeError: broken on purpose"):
            launch(recipe)
    else:
        assert launch(recipe).status == "KILLED"
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(how)
    (run,) = client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL)
    assert run.info.status == status
    error = "RuntimeError: broken on purpose" if how == "raises" else None
    assert run.data.tags.get("qrl.error") == error
    assert "qrl.policy_sha256" not in run.data.tags
    assert any(re.match(r"no |\d+ |step 1/2", line) for line in log_of(uri, run.info.run_id))
    assert "perf/max_memory_rss_gb" in run.data.metrics


@pytest.mark.slow
def test_three_processes_record_in_one_new_file_at_once(here):
    where = "tracking.uri=sqlite:///new.db"
    commands = [[*QRL, "fit", "-r", "base", *SMALL, where, f"seed={seed}"] for seed in range(3)]
    started = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    errors = [process.communicate(timeout=280)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], errors
    client = MlflowClient("sqlite:///new.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "lightning_qrl"]
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.tags["qrl.seed"] for run in runs) == ["0", "1", "2"]
    for run in runs:
        assert run.info.status == "FINISHED"
        for key in ("train/reward", "train/loss", "train/grad_norm"):
            steps = [m.step for m in client.get_metric_history(run.info.run_id, key)]
            assert steps == [1, 2], key


@pytest.mark.slow
def test_a_policy_goes_to_a_server_and_comes_back(here, monkeypatch):
    server = Server(here)
    server.start()
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        models = ["tracking.log_models=checkpoints", "callbacks.checkpoint.every_n_epochs=2"]
        outcome = launch(load_recipe("base", [*SMALL, *models]))
        run = MlflowClient(server.uri).get_run(outcome.run.run_id)
        assert [o.step for o in run.outputs.model_outputs] == [2, 2]
        mlflow.set_tracking_uri(server.uri)
        for output in run.outputs.model_outputs:
            folder = mlflow.artifacts.download_artifacts(f"models:/{output.model_id}")
            model = AutoModelForCausalLM.from_pretrained(folder)
            assert weights_sha256(model) == run.data.tags["qrl.policy_sha256"]
        assert log_of(server.uri, outcome.run.run_id)
    finally:
        mlflow.set_tracking_uri(None)
        server.stop()
