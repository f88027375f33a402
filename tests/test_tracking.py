"""Runs in MLflow, without any training."""

import json
import math
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient

from lightning_qrl.errors import UserError
from lightning_qrl.tracking import MLflowRun, git_tags


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    """One database for all: to make one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


@pytest.fixture
def run(uri, here) -> MLflowRun:
    run = MLflowRun("tests", "a run", uri)
    run.start({}, {})
    return run


def stored(run: MLflowRun):
    return MlflowClient(run.uri).get_run(run.run_id)


def history(run: MLflowRun, key: str) -> list[tuple[int, float]]:
    metrics = MlflowClient(run.uri).get_metric_history(run.run_id, key)
    return [(metric.step, metric.value) for metric in metrics]


def failure(run: MLflowRun) -> str:
    """What `start` says; nothing may be left behind."""
    before = sorted(Path.cwd().rglob("*"))
    with pytest.raises(UserError) as caught:
        run.start({}, {})
    assert sorted(Path.cwd().rglob("*")) == before
    assert run.run_id == ""
    run.finish("FAILED")  # what was not started need not be finished
    return str(caught.value)


def test_the_default_is_a_sqlite_file_here(here):
    assert MLflowRun().uri == "sqlite:///mlflow.db"


def test_the_environment_is_respected_and_the_recipe_wins(here, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///env.db")
    assert MLflowRun().uri == "sqlite:///env.db"
    assert MLflowRun(uri="sqlite:///own.db").uri == "sqlite:///own.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert MLflowRun().uri == "sqlite:///mlflow.db"


def test_a_run_has_its_experiment_name_tags_and_folder(uri, here):
    run = MLflowRun("an experiment", "name/with: odd*characters", uri, folder="out/runs")
    run.start({"a.b": 1}, {"qrl.recipe": "r"})
    found = stored(run)
    experiment = MlflowClient(uri).get_experiment(found.info.experiment_id)
    assert experiment.name == "an experiment"
    assert found.info.run_name == "name/with: odd*characters"
    assert found.info.status == "RUNNING"
    assert found.data.params == {"a.b": "1"}
    assert found.data.tags["qrl.recipe"] == "r"
    assert Path(found.data.tags["qrl.folder"]) == run.run_folder
    assert run.run_folder.is_dir()
    assert run.run_folder.parent == here / "out" / "runs"
    assert (run.save_dir, run.name) == (str(here / "out" / "runs"), "")
    assert run.version == run.run_folder.name


def test_params_of_any_number_length_and_key(uri, here):
    run = MLflowRun("tests", "params", uri)
    many = {f"key{i}": i for i in range(250)}
    odd = {"a@b{c}": 1, "x/../y": 2, "/z": 3, "callbacks.my callback!.x": 4, "k" * 300: 5, ".": 6}
    run.start({**many, **odd, "long": "v" * 7000, "none": None, "list": [1, {"a": 2}]}, {})
    params = stored(run).data.params
    assert len(params) == 250 + len(odd) + 3
    assert params["key249"] == "249"
    assert params["a_b_c_"] == "1"
    assert params["callbacks.my callback_.x"] == "4"
    assert params["k" * 250] == "5"
    assert len(params["long"]) == 6000
    assert params["long"].startswith("v" * 5900)
    assert params["long"].endswith("whole in recipe.yaml)")
    assert (params["none"], params["list"]) == ("None", "[1, {'a': 2}]")


def test_metrics_at_each_step_once(run):
    for step in (0, 1, 2):
        run.log_metrics({"train/reward": step / 2, "epoch": step}, step)
    assert history(run, "train/reward") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert "epoch" not in stored(run).data.metrics


def test_metrics_that_are_not_finite_or_oddly_named_do_not_fail(run):
    run.log_metrics({"nan": math.nan, "inf": math.inf, "minus": -math.inf, "a|b@c": 1.0}, 1)
    assert {"nan", "inf", "minus", "a_b_c"} <= stored(run).data.metrics.keys()


def test_a_resumed_run_logs_only_what_is_newer(run, uri):
    for step in (1, 2, 3):
        run.log_metrics({"train/reward": float(step)}, step)
    run.log_metrics({"eval/reward": 0.5}, 2)
    run.finish("KILLED")
    again = MLflowRun("another", "name", uri, folder="elsewhere")
    assert again.resume(run.run_id)
    assert stored(run).info.status == "RUNNING"
    for step in (2, 3, 4):
        again.log_metrics({"train/reward": float(step)}, step)
    again.log_metrics({"eval/reward": 0.7}, 4)
    again.log_metrics({"new": 1.0}, 1)
    assert history(run, "train/reward") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert history(run, "eval/reward") == [(2, 0.5), (4, 0.7)]
    assert history(run, "new") == [(1, 1.0)]
    assert again.run_folder == run.run_folder
    assert again.run_name == run.run_name
    again.finish("FINISHED")
    assert stored(run).info.status == "FINISHED"


def test_a_run_that_the_server_does_not_know_is_not_resumed(uri, here):
    assert not MLflowRun("tests", "x", uri).resume("0" * 32)
    assert not MLflowRun("tests", "x").resume("0" * 32)
    assert not list(here.iterdir())  # no database was made to find that out


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_the_final_status_is_recorded(run, status):
    run.finish(status)
    assert stored(run).info.status == status
    assert stored(run).info.end_time


def test_a_table_keeps_texts_and_replaces_repeated_steps(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", run.uri)  # load_table looks there alone

    def log(step: int, *completions: str) -> None:
        columns = {"step": [step] * len(completions), "completion": completions}
        run.log_table(columns, "completions.json")

    log(1, "095", "1e3")
    log(2, "3", "null")
    log(2, "3", "4")  # as a resumed run does
    log(3, "2020-01-01")
    client = MlflowClient(run.uri)
    table = json.loads(Path(client.download_artifacts(run.run_id, "completions.json")).read_text())
    assert table == {
        "columns": ["step", "completion"],
        "data": [[1, "095"], [1, "1e3"], [2, "3"], [2, "4"], [3, "2020-01-01"]],
    }
    experiment = stored(run).info.experiment_id
    loaded = client.load_table(experiment, "completions.json", run_ids=[run.run_id])
    assert list(loaded["step"]) == [1, 1, 2, 2, 3]


def test_texts_and_json_are_artefacts(run):
    run.log_text("a\n", "recipe.yaml")
    run.log_json({"x": [1]}, "plan.json")
    client = MlflowClient(run.uri)
    assert Path(client.download_artifacts(run.run_id, "recipe.yaml")).read_text() == "a\n"
    assert json.loads(Path(client.download_artifacts(run.run_id, "plan.json")).read_text()) == {
        "x": [1]
    }


def test_find_by_id_name_and_folder(run, uri, here):
    newest = MLflowRun("tests", "a run", uri)
    newest.start({}, {})
    looking = MLflowRun(uri=uri)
    assert looking.find(run.run_id) == run.run_folder
    assert looking.find("a run") == newest.run_folder
    assert looking.find(run.run_folder.name) == run.run_folder
    for name in ("no such run", "it's", "100%", ""):
        with pytest.raises(UserError, match=r"^no run "):
            looking.find(name)


def test_a_run_of_somebody_else_is_named_as_such(run, uri):
    client = MlflowClient(uri)
    foreign = client.create_run(stored(run).info.experiment_id, run_name="foreign")
    with pytest.raises(UserError, match="was not made by qrl"):
        MLflowRun(uri=uri).find(foreign.info.run_id)


def test_finding_makes_no_database(here):
    with pytest.raises(UserError, match=r"no run x: there is no mlflow\.db"):
        MLflowRun().find("x")
    assert not list(here.iterdir())


@pytest.mark.parametrize("arguments", [{"experiment": " "}, {"run_name": ""}])
def test_names_must_not_be_empty(arguments):
    with pytest.raises(ValueError, match="must not be empty"):
        MLflowRun(**arguments)


@pytest.mark.parametrize("folder", ["file/runs", "file", "/proc/x/runs", "/dev/null/x"])
def test_an_output_folder_that_cannot_be_written(here, uri, folder):
    (here / "file").write_text("")
    assert "output folder" in failure(MLflowRun("tests", "x", uri, folder))


def test_nothing_is_made_when_the_database_cannot_be(here):
    (here / "file").write_text("")
    assert "folder file cannot be written" in failure(MLflowRun(uri="sqlite:///file/x.db"))
    assert "/proc" in failure(MLflowRun(uri="sqlite:////proc/x/mlflow.db"))


def test_files_that_are_no_database(here):
    (here / "text.db").write_text("this is no database, but long enough to be one")
    assert "no sqlite database" in failure(MLflowRun(uri="sqlite:///text.db"))
    (here / "folder.db").mkdir()
    assert "folder.db" in failure(MLflowRun(uri="sqlite:///folder.db"))


def test_a_database_of_something_else(here):
    other = sqlite3.connect(here / "foreign.db")
    other.execute("CREATE TABLE alembic_version (version_num TEXT)")
    other.execute("INSERT INTO alembic_version VALUES ('abcdef')")
    other.commit()
    other.close()
    assert "MLflow at sqlite:///foreign.db" in failure(MLflowRun(uri="sqlite:///foreign.db"))


@pytest.mark.parametrize(
    "uri", ["ftp://host/x", "sqlite", "nonsense://", "./mlruns", "file:///tmp/x", "http://", "://"]
)
def test_uris_that_mlflow_cannot_use(here, uri):
    assert uri in failure(MLflowRun(uri=uri))


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["http", "postgresql", "mysql+pymysql"])
def test_a_server_that_is_not_there(here, closed_port, scheme):
    began = time.perf_counter()
    message = failure(MLflowRun(uri=f"{scheme}://127.0.0.1:{closed_port}/db"))
    assert "does not answer" in message
    assert time.perf_counter() - began < 5


def test_a_server_that_accepts_and_never_answers(here):
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.perf_counter()
        message = failure(MLflowRun(uri=f"http://127.0.0.1:{server.getsockname()[1]}"))
    assert "does not answer (ReadTimeout)" in message
    assert time.perf_counter() - began < 10


def test_a_server_that_is_broken_is_not_tried_again_for_minutes(here):
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began = time.perf_counter()
        message = failure(MLflowRun(uri=f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    assert "does not answer (HTTPError)" in message
    assert time.perf_counter() - began < 5


def test_git_tags_name_the_commit_of_a_checkout_only(tmp_path):
    assert git_tags(tmp_path) == {}
    tags = git_tags(Path(__file__).parent)
    if tags:  # the tests may run from an unpacked archive
        assert len(tags["qrl.git_commit"]) == 40
        assert tags["qrl.git_dirty"] in ("true", "false")


CONNECT = "from lightning_qrl.tracking import MLflowRun; MLflowRun('e').start({}, {})"


@pytest.mark.slow
def test_two_runs_may_begin_in_a_fresh_folder_at_once(here):
    command = [sys.executable, "-c", CONNECT]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
