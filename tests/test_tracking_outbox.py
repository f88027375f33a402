"""A server that goes away and comes back: all arrives, in order, and nothing twice."""

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow_server import Server

from lightning_qrl.errors import UserError
from lightning_qrl.tracking import MLflowRun, outbox
from lightning_qrl.tracking.client import connect
from lightning_qrl.tracking.files import disown, own
from lightning_qrl.tracking.letters import METRICS_PER_BATCH, merged
from lightning_qrl.tracking.reach import takes_writes


class Flaky:
    """A client of a real store whose server is away, or does not hear its own answers."""

    def __init__(self, uri: str) -> None:
        self.client = connect(uri)
        self.mode = "there"

    def __getattr__(self, name: str):
        def call(*args, **kwargs):
            if self.mode == "away":
                raise ConnectionError("no route")
            answer = getattr(self.client, name)(*args, **kwargs)
            if self.mode == "mute":
                raise ConnectionError("the answer was lost")
            return answer

        return call


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def begin(uri, tmp_path, monkeypatch):
    monkeypatch.setattr(outbox, "SHORTEST", 0.0)
    monkeypatch.setattr(outbox, "CALM", 0.0)
    monkeypatch.setattr(outbox, "AT_THE_END", 0.2)

    def make(name: str = "a run") -> tuple[MLflowRun, Flaky]:
        run = MLflowRun("tests", name, uri, folder=str(tmp_path / "runs"))
        run._client = Flaky(uri)
        run.start({"a": 1}, {"tag": "x"})
        return run, run._client

    return make


def history(run: MLflowRun, key: str) -> list[tuple[int, float]]:
    metrics = MlflowClient(run.uri).get_metric_history(run.run_id, key)
    return [(metric.step, metric.value) for metric in metrics]


def artefact(run: MLflowRun, path: str) -> str:
    return Path(MlflowClient(run.uri).download_artifacts(run.run_id, path)).read_text()


def test_what_a_server_misses_it_gets_in_order_and_once(begin, capsys):
    run, server = begin()
    for step in range(10):
        server.mode = "away" if 3 <= step < 7 else "there"
        run.log_metrics({"m": step / 2, "n": -step}, step)
        run.log_table({"step": [step], "text": [f"{step}"]}, "table.json")
        run.set_tags({"last": str(step)})
        assert (run.run_folder / "outbox.jsonl").exists() == (3 <= step < 7)
    run.log_text("a", "b/c.txt")
    run.finish("FINISHED")
    assert history(run, "m") == [(step, step / 2) for step in range(10)]
    assert history(run, "n") == [(step, -step) for step in range(10)]
    assert json.loads(artefact(run, "table.json"))["data"] == [[i, str(i)] for i in range(10)]
    assert artefact(run, "b/c.txt") == "a"
    found = MlflowClient(run.uri).get_run(run.run_id)
    assert (found.info.status, found.data.tags["last"]) == ("FINISHED", "9")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "is away (no route)" in said[0]
    assert "is back" in said[1]


def test_what_was_heard_but_not_answered_is_not_doubled(begin):
    run, server = begin()
    values = [0.1, math.nan, math.inf, -math.inf, 1e300, 0.0]
    for step, value in enumerate(values):
        server.mode = "mute"
        run.log_metrics({"m": value}, step)
        server.mode = "there"
        run.log_metrics({"other": 1.0}, step)
    run.finish("FINISHED")
    stored = history(run, "m")
    assert [step for step, _ in stored] == list(range(6))
    largest = sys.float_info.max
    expected = [0.1, math.nan, largest, -largest, 1e300, 0.0]
    assert [value for _, value in stored] == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_a_run_that_ends_while_its_server_is_away_is_completed_by_the_next(begin, capsys):
    run, server = begin("first")
    server.mode = "away"
    run.log_metrics({"m": 1.0}, 1)
    run.log_text("text", "a.txt")
    before = time.time()
    run.finish("KILLED")
    assert "is sent when the next run starts" in capsys.readouterr().err
    assert history(run, "m") == []
    handle = own(run.run_folder)  # as if its process were at work yet
    begin("second")[0].finish("FINISHED")
    assert history(run, "m") == []
    disown(handle)
    begin("third")[0].finish("FINISHED")
    assert history(run, "m") == [(1, 1.0)]
    assert artefact(run, "a.txt") == "text"
    info = MlflowClient(run.uri).get_run(run.run_id).info
    assert info.status == "KILLED"
    assert info.end_time / 1000 == pytest.approx(
        before, abs=1
    )  # when it ended, not when it said so
    assert not (run.run_folder / "outbox.jsonl").exists()


def test_what_waits_for_another_server_is_left_alone(begin):
    run, server = begin()
    server.mode = "away"
    run.log_metrics({"m": 1.0}, 1)
    run.finish("FAILED")
    file = run.run_folder / "outbox.jsonl"
    file.write_text(file.read_text().replace("mlflow.db", "other.db"))
    waiting = file.read_bytes()
    begin("next")[0].finish("FINISHED")
    assert file.read_bytes() == waiting


def test_a_resumed_run_sends_first_what_it_had_kept(begin, uri):
    run, server = begin()
    run.log_metrics({"m": 1.0}, 1)
    server.mode = "away"
    run.log_metrics({"m": 2.0}, 2)
    run.finish("KILLED")
    with (run.run_folder / "outbox.jsonl").open("a") as file:
        file.write('{"kind": "metrics", "val')  # killed while it wrote
    again = MLflowRun("tests", "x", uri)
    assert again.resume(run.run_id)
    for step in (2, 3):
        again.log_metrics({"m": float(step)}, step)
    again.finish("FINISHED")
    assert history(run, "m") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert MlflowClient(uri).get_run(run.run_id).info.status == "FINISHED"


def test_a_run_that_is_at_work_cannot_be_resumed(begin, uri):
    run, _ = begin()
    with pytest.raises(UserError, match="is at work in another process"):
        MLflowRun("tests", "x", uri).resume(run.run_id)
    run.finish("FINISHED")


def test_what_is_never_taken_does_not_hold_up_the_rest(begin, uri, capsys):
    run, _ = begin()
    run._send({"kind": "file", "path": "not there.txt"})
    run.log_metrics({"m": 1.0}, 1)
    assert history(run, "m") == [(1, 1.0)]
    refused = json.loads((run.run_folder / "refused.jsonl").read_text())
    assert refused["path"] == "not there.txt"
    MlflowClient(uri).delete_run(run.run_id)
    run.log_metrics({"m": 2.0}, 2)  # somebody has deleted the run: training goes on
    run.finish("FINISHED")
    assert len((run.run_folder / "refused.jsonl").read_text().splitlines()) == 3
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "refuses a part of run" in said[0]


def test_a_full_disk_while_the_server_is_away_is_one_line(begin, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    run, server = begin()
    server.mode = "away"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"outbox\.jsonl cannot be written: No space left"):
            run.log_metrics({"m": 1.0}, 1)
    server.mode = "there"
    run.finish("FAILED")


def test_tries_are_rare_while_a_server_is_away(begin, monkeypatch):
    run, server = begin()
    monkeypatch.setattr(outbox, "SHORTEST", 60.0)
    server.mode = "away"
    run.log_metrics({"m": 0.0}, 0)
    server.mode = "there"
    for step in (1, 2):
        run.log_metrics({"m": float(step)}, step)
    assert history(run, "m") == []  # it waits for a minute before it asks again
    run.finish("FINISHED")
    assert len(history(run, "m")) == 3


sizes = st.lists(st.one_of(st.integers(1, 700), st.just("tags")), max_size=20)


@given(sizes)
def test_metrics_are_sent_together_and_everything_else_in_its_place(sizes):
    letters = [
        {"kind": "tags", "values": {}} if size == "tags"
        else {"kind": "metrics", "values": [(i, j) for j in range(size)]}
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    sent = list(merged((letter, i) for i, letter in enumerate(letters)))

    def flat(letters):
        return [
            entry
            for letter in letters
            for entry in (letter["values"] if letter["kind"] == "metrics" else ["tags"])
        ]

    assert flat(letter for letter, _ in sent) == flat(letters)
    ends = [end for _, end in sent]
    assert ends == sorted(ends)
    assert not ends or ends[-1] == len(letters) - 1
    assert all(len(letter["values"]) <= METRICS_PER_BATCH for letter, _ in sent)


def test_whether_a_database_takes_writes(uri, tmp_path):
    import sqlite3

    file = tmp_path / "x ?#.db"
    where = f"sqlite:///{file}"
    assert not takes_writes(where)
    assert not file.exists()
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE t (x)")
    database.execute("BEGIN EXCLUSIVE")
    busy = f"sqlite:///{tmp_path}/busy.db"
    file.rename(tmp_path / "busy.db")
    assert not takes_writes(busy)
    database.rollback()
    assert takes_writes(busy)
    assert takes_writes("http://127.0.0.1:9")  # a server is tried instead


@pytest.mark.slow
def test_a_real_server_is_killed_and_comes_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    server = Server(tmp_path)
    server.start()
    runs = [MLflowRun("tests", name, server.uri) for name in ("disturbed", "undisturbed")]
    try:
        for run in runs:
            run.start({"a": 1}, {})
            for step in range(40):
                if run is runs[0] and step == 10:
                    server.stop()
                if run is runs[0] and step == 30:
                    server.start()
                run.log_metrics({f"m{i}": step * i / 7 for i in range(8)}, step)
                run.log_table({"step": [step], "text": ["é"]}, "table.json")
            run.finish("FINISHED")
        for i in range(8):
            assert history(runs[0], f"m{i}") == history(runs[1], f"m{i}")
        assert history(runs[0], "m7") == [(step, float(step)) for step in range(40)]
        assert artefact(runs[0], "table.json") == artefact(runs[1], "table.json")
        for run in runs:
            found = MlflowClient(server.uri).get_run(run.run_id)
            assert (found.info.status, found.data.params) == ("FINISHED", {"a": "1"})
        assert [" is away " in line for line in capsys.readouterr().err.splitlines()] == [
            True,
            False,
        ]
    finally:
        server.stop()
