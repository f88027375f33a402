"""What a run leaves besides metrics: datasets, models, what the machine did, logs."""

import json
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM

from lightning_qrl.policy import weights_sha256
from lightning_qrl.tracking import MLflowRun
from lightning_qrl.tracking.datasets import dataset
from lightning_qrl.tracking.models import Policies
from lightning_qrl.tracking.outbox import Outbox


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def begin(uri, tmp_path, tiny_policy):
    def make(**arguments) -> MLflowRun:
        run = MLflowRun("tests", "a run", uri, str(tmp_path / "runs"), **arguments)
        run.start({}, {})
        save = lambda folder: shutil.copytree(tiny_policy.name, folder)  # noqa: E731
        run.policies = Policies("rec/ipe.x", {"qrl.recipe": "r"}, save, lambda: 3)
        return run

    return make


def stored(run: MLflowRun):
    return MlflowClient(run.uri).get_run(run.run_id)


def models(run: MLflowRun):
    client = MlflowClient(run.uri)
    return [client.get_logged_model(o.model_id) for o in stored(run).outputs.model_outputs]


def test_the_final_policy_is_a_model_that_transformers_loads(begin, tiny_policy, monkeypatch):
    run = begin()
    run.log_metrics({"eval/reward": 0.25}, 0)
    run.log_metrics({"eval/reward": 0.75, "eval/solved": 0.5}, 3)
    shutil.copytree(tiny_policy.name, run.run_folder / "policy")
    letter = run.policies.final(run.run_folder / "policy", "abc")
    for _ in range(2):  # as if the answer to the first had been lost
        run.log_policy(run.run_folder / "policy", "abc")
        run._send(letter)
    run.finish("FINISHED")
    (model,) = models(run)
    assert (model.name, model.status, model.source_run_id) == ("rec_ipe_x", "READY", run.run_id)
    assert [o.step for o in stored(run).outputs.model_outputs] == [3]
    assert model.tags["qrl.recipe"] == "r"
    assert model.tags["qrl.policy_sha256"] == stored(run).data.tags["qrl.policy_sha256"] == "abc"
    linked = {(m.key, m.step, m.value) for m in model.metrics}
    assert linked == {("eval/reward", 3, 0.75), ("eval/solved", 3, 0.5)}
    history = MlflowClient(run.uri).get_metric_history(run.run_id, "eval/reward")
    assert [(m.step, m.value) for m in history] == [(0, 0.25), (3, 0.75)]  # not logged again
    monkeypatch.setenv("MLFLOW_TRACKING_URI", run.uri)
    folder = mlflow.artifacts.download_artifacts(f"models:/{model.model_id}")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert weights_sha256(loaded) == weights_sha256(tiny_policy.build())


def test_a_model_that_was_cut_short_is_completed(begin, tiny_policy):
    run = begin()
    shutil.copytree(tiny_policy.name, run.run_folder / "policy")
    letter = run.policies.final(run.run_folder / "policy", "abc")
    client = run._client

    class Cut:
        def __getattr__(self, name: str):
            return getattr(client, name)

        def log_model_artifacts(self, model_id: str, folder: str) -> None:
            raise ConnectionError("cut")

    whole = run._outbox
    run._outbox = Outbox(Cut(), whole.uri, run.run_id, run.run_folder)
    run._send(letter)
    assert stored(run).outputs.model_outputs == []
    run._outbox = whole
    run.finish("FINISHED")
    (model,) = models(run)
    assert model.status == "READY"


@pytest.mark.parametrize(("mode", "count"), [("none", 0), ("final", 1), ("checkpoints", 2)])
def test_which_models_are_kept(begin, tiny_policy, mode, count):
    run = begin(log_models=mode)
    for _ in range(2):  # two callbacks save at one step
        run.after_save_checkpoint(None)
    shutil.copytree(tiny_policy.name, run.run_folder / "policy")
    run.log_policy(run.run_folder / "policy", "abc")
    run.finish("FINISHED")
    assert len(models(run)) == count
    assert [folder.name for folder in run.run_folder.iterdir()] == ["policy"]
    if mode == "checkpoints":
        assert {m.name for m in models(run)} == {"rec_ipe_x", "rec_ipe_x-step-3"}


def test_without_room_for_a_copy_the_policy_stays_where_it_is(
    begin, tiny_policy, monkeypatch, capsys
):
    run = begin()
    shutil.copytree(tiny_policy.name, run.run_folder / "policy")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 100))
    run.log_policy(run.run_folder / "policy", "abc")
    run.finish("FINISHED")
    assert "no room for a copy of" in capsys.readouterr().err
    assert stored(run).info.status == "FINISHED"


def test_the_hash_of_weights_sees_names_shapes_dtypes_and_bytes():
    def model(**weights):
        module = torch.nn.Module()
        for name, weight in weights.items():
            module.register_buffer(name, weight)
        return module

    zeros = torch.zeros(2, 3)
    others = [
        model(b=zeros),
        model(a=zeros.T),
        model(a=torch.zeros(2, 3, dtype=torch.float16)),
        model(a=zeros + 1e-45),
        model(a=zeros, c=torch.tensor(1)),
        model(a=torch.zeros(2, 3, dtype=torch.bfloat16)),
    ]
    hashes = {weights_sha256(m) for m in [model(a=zeros), *others]}
    assert len(hashes) == 1 + len(others)
    assert weights_sha256(model(a=zeros, b=zeros)) == weights_sha256(model(b=zeros, a=zeros))


def test_the_splits_of_a_task_are_inputs_of_the_run(begin):
    run = begin()
    splits = [dataset("sums", {"digits": 2}, s, [("1+1=", "2")] * 3) for s in ("train", "held_out")]
    for _ in range(2):
        run.log_datasets(splits)
    run.finish("FINISHED")
    inputs = stored(run).inputs.dataset_inputs
    assert {(i.dataset.name, i.tags[0].key, i.tags[0].value) for i in inputs} == {
        ("sums/train", "mlflow.data.context", "train"),
        ("sums/held_out", "mlflow.data.context", "held_out"),
    }
    for i in inputs:
        assert json.loads(i.dataset.source) == {"task": "sums", "arguments": {"digits": 2}}
        assert json.loads(i.dataset.profile) == {"num_prompts": 3}
        assert len(i.dataset.digest) == 16


def test_the_digest_is_of_prompts_and_answers_in_their_order():
    def digest(*pairs: tuple[str, str]) -> str:
        return dataset("t", {}, "train", pairs)["digest"]

    different = [
        digest(("a", "b")), digest(("ab", "")), digest(("a", "b"), ("c", "d")),
        digest(("c", "d"), ("a", "b")), digest(),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert digest(("a", "b")) == dataset("other", {"x": 1}, "held_out", [("a", "b")])["digest"]


def test_the_machine_is_watched_from_the_start_to_the_end_of_a_short_run(begin, uri):
    run = begin(system_metrics_seconds=60.0)
    run.watch_system()
    time.sleep(0.3)
    run.log_metrics({"m": 1.0}, 1)  # from another thread than the samples
    run.finish("KILLED")
    assert not any(t.name == "system metrics" for t in threading.enumerate())
    client = MlflowClient(uri)

    def steps(key: str) -> list[int]:
        return [m.step for m in client.get_metric_history(run.run_id, key)]

    metrics = stored(run).data.metrics
    assert {
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
        "system/disk_usage_percentage",
    } <= metrics.keys()
    assert 0 < metrics["system/system_memory_usage_percentage"] <= 100
    assert steps("system/cpu_utilization_percentage") == [0, 1]
    again = MLflowRun("tests", "x", uri, system_metrics_seconds=0.2)
    assert again.resume(run.run_id)
    again.watch_system()
    time.sleep(1.0)
    again.finish("FINISHED")
    numbers = steps("system/cpu_utilization_percentage")
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 4


def test_nothing_is_sampled_at_an_interval_of_0(begin):
    run = begin(system_metrics_seconds=0)
    run.watch_system()
    run.finish("FINISHED")
    assert stored(run).data.metrics == {}


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_intervals_that_are_none(seconds):
    with pytest.raises(ValueError, match="system_metrics_seconds: expected 0 or more"):
        MLflowRun(system_metrics_seconds=seconds)


def test_a_log_grows_over_resumed_runs_even_if_the_folder_is_lost(begin, uri):
    run = begin()
    run.log_line("first", "live_view.log")
    run.log_table({"step": [1], "text": ["a"]}, "table.json")
    run.finish("FAILED")
    shutil.rmtree(run.run_folder / "artifacts")
    again = MLflowRun("tests", "x", uri)
    assert again.resume(run.run_id)
    again.log_line("second", "live_view.log")
    again.log_table({"step": [2], "text": ["b"]}, "table.json")
    again.finish("FINISHED")

    def artefact(name: str) -> str:
        return Path(MlflowClient(uri).download_artifacts(run.run_id, name)).read_text()

    assert artefact("live_view.log") == "first\nsecond\n"
    assert json.loads(artefact("table.json"))["data"] == [[1, "a"], [2, "b"]]
