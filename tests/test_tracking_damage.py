"""What an artefact store, a server, a disk or a stranger may do to the letters of a run."""

import json
import os
import sqlite3
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from lightning_qrl.errors import UserError
from lightning_qrl.tracking import MLflowRun, outbox
from lightning_qrl.tracking.client import connect
from lightning_qrl.tracking.reach import BRIEF, TIMEOUT, UPLOAD_SECONDS, be_brief, patient, shown


class Picky:
    """A client of a real store that fails at one tag, one metric, or everything."""

    def __init__(self, uri: str) -> None:
        self.client = connect(uri)
        self.fails_at = "nothing"

    def __getattr__(self, name: str):
        def call(*args, **kwargs):
            sent = [part.key for kind in ("tags", "metrics") for part in kwargs.get(kind, ())]
            if self.fails_at in ("everything", *sent):
                raise MlflowException("broken here")  # INTERNAL_ERROR
            return getattr(self.client, name)(*args, **kwargs)

        return call


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def begin(uri, tmp_path, monkeypatch):
    monkeypatch.setattr(outbox, "SHORTEST", 0.0)
    monkeypatch.setattr(outbox, "CALM", 0.0)
    monkeypatch.setattr(outbox, "AT_THE_END", 0.2)

    def make(experiment: str = "tests") -> tuple[MLflowRun, Picky]:
        run = MLflowRun(experiment, "a run", uri, folder=str(tmp_path / "runs"))
        run._client = Picky(uri)
        run.start({"a": 1}, {})
        return run, run._client

    return make


def stored(run: MLflowRun):
    return MlflowClient(run.uri).get_run(run.run_id)


def lines(run: MLflowRun, name: str) -> list[dict]:
    return [json.loads(line) for line in (run.run_folder / name).read_text().splitlines()]


def steps(run: MLflowRun, key: str) -> list[int]:
    return [m.step for m in MlflowClient(run.uri).get_metric_history(run.run_id, key)]


@pytest.fixture
def unwritable(uri, tmp_path) -> str:
    """An experiment whose artefacts belong where a file is."""
    (tmp_path / "file").write_text("")
    where = f"file://{tmp_path}/file/artefacts"
    client = connect(uri)
    client.create_experiment(f"unwritable in {tmp_path}", where)
    return f"unwritable in {tmp_path}"


def test_artefacts_that_cannot_be_stored_hold_nothing_up(begin, unwritable, capsys):
    run, _ = begin(unwritable)
    for step in range(5):
        run.log_table({"step": [step], "text": ["a"]}, "table.json")
        run.log_text("b", "text.txt")
        run.log_metrics({"m": 1.0}, step)
    assert steps(run, "m") == [0, 1, 2, 3, 4]
    run.finish("FINISHED")
    assert stored(run).info.status == "FINISHED"
    assert not list(run.run_folder.glob("outbox*"))
    assert [letter["path"] for letter in lines(run, "refused.jsonl")] == ["table.json", "text.txt"]
    assert (run.run_folder / "artifacts" / "text.txt").read_text() == "b"
    said = capsys.readouterr().err.splitlines()
    assert [" cannot store artefacts " in said[0], " refuses a part " in said[1]] == [True, True]


def test_artefacts_come_when_their_store_does(begin, unwritable, tmp_path):
    run, _ = begin(unwritable)
    run.log_text("early", "text.txt")
    run.log_text("late", "text.txt")
    (tmp_path / "file").unlink()
    run.log_metrics({"m": 1.0}, 1)
    text = MlflowClient(run.uri).download_artifacts(run.run_id, "text.txt")
    assert Path(text).read_text() == "late"
    run.finish("FINISHED")
    assert not (run.run_folder / "refused.jsonl").exists()


def test_one_letter_that_a_server_fails_at_is_set_aside(begin, capsys):
    run, server = begin()
    server.fails_at = "poison"
    run.set_tags({"poison": "x"})
    run.log_metrics({"m": 1.0}, 1)
    assert steps(run, "m") == [1]
    (refused,) = lines(run, "refused.jsonl")
    assert (refused["values"], refused["refused"]) == ({"poison": "x"}, "broken here")
    run.finish("FINISHED")
    assert stored(run).info.status == "FINISHED"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_server_that_fails_at_everything_is_waited_for(begin):
    run, server = begin()
    server.fails_at = "everything"
    run.log_metrics({"m": 1.0}, 1)
    run.log_text("a", "a.txt")
    assert run._outbox.waiting
    server.fails_at = "nothing"
    run.finish("FINISHED")
    assert steps(run, "m") == [1]
    assert not (run.run_folder / "refused.jsonl").exists()


class Broken(BaseHTTPRequestHandler):
    """Is healthy, and its API is not."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send_response(200)
            self.end_headers()
        elif self.server.hangs:
            time.sleep(20)
        else:
            self.send_error(500)

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_whose_api_is_broken_is_found_out_within_seconds(tmp_path, monkeypatch, hangs):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(BRIEF, TIMEOUT, "1")
    for name in BRIEF:
        monkeypatch.setenv(name, "")  # to be put back as it was
        monkeypatch.delenv(name)
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        server.hangs, server.daemon_threads, server.block_on_close = hangs, True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(UserError, match="^MLflow at http"):
            MLflowRun(uri=f"http://127.0.0.1:{server.server_port}").start({}, {})
        assert time.monotonic() - began < 8
        server.shutdown()


def test_how_long_a_server_is_waited_for(monkeypatch):
    monkeypatch.setenv(TIMEOUT, "7")
    be_brief()
    with patient():
        assert os.environ[TIMEOUT] == "7"  # the user's own
    monkeypatch.setenv(TIMEOUT, BRIEF[TIMEOUT])
    with patient():
        assert os.environ[TIMEOUT] == UPLOAD_SECONDS
    assert os.environ[TIMEOUT] == BRIEF[TIMEOUT]


def test_a_locked_database_is_not_waited_for(begin, uri):
    run, _ = begin()
    database = sqlite3.connect(uri.removeprefix("sqlite:///"))
    database.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    run.log_metrics({"m": 1.0}, 1)
    assert time.monotonic() - began < 4  # two tries of a second each, where MLflow waits for 20
    database.rollback()
    run.finish("FINISHED")
    assert steps(run, "m") == [1]


def test_what_is_kept_before_and_after_a_full_disk_arrives(begin, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    run, server = begin()
    server.fails_at = "everything"
    for step in (1, 2, 3, 4):
        with monkeypatch.context() as patch:
            if step % 2:
                patch.setattr(os, "fsync", full)
                with pytest.raises(UserError, match=r"outbox\.jsonl cannot be written"):
                    run.log_metrics({"m": 1.0}, step)
            else:
                run.log_metrics({"m": 1.0}, step)
        assert (run.run_folder / "outbox.jsonl").exists() == (step > 1)
    run.finish("KILLED")
    begin()[0].finish("FINISHED")
    assert (steps(run, "m"), stored(run).info.status) == ([2, 4], "KILLED")


DAMAGE = {
    "torn": b'{"to": ["s',
    "nothing": b"",
    "nulls": b"\x00" * 50,
    "no text": b"\xff\xfe{}\n",
    "a list": b"[1]\n",
    "deep": b"[" * 100_000 + b"\n",
    "no address": b'{"kind": "tags", "values": {}}\n',
    "an unknown kind": b'{"to": TO, "kind": "zzz"}\n',
    "no values": b'{"to": TO, "kind": "metrics"}\n',
    "odd tags": b'{"to": TO, "kind": "tags", "values": 3}\n',
    "a path that is none": b'{"to": TO, "kind": "file", "path": [1]}\n',
    "no folder": b'{"to": TO, "kind": "model"}\n',
    "two in one": b'{"to": TO, "ki{"to": TO, "kind": "tags", "values": {}}\n',
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_letters_stop_no_run(begin, uri, damage, capsys):
    old, server = begin()
    file = old.run_folder / "outbox.jsonl"
    damage = damage.replace(b"TO", json.dumps([uri, old.run_id]).encode())
    server.fails_at = "everything"
    old.set_tags({"before": "1"})
    with file.open("ab") as opened:
        opened.write(damage)
    old.set_tags({"after": "1"})  # while it is at work
    file.write_bytes(damage + b"\n" + file.read_bytes())  # and the first line
    old.finish("KILLED")
    capsys.readouterr()
    new, _ = begin()
    new.log_metrics({"m": 1.0}, 1)
    new.finish("FINISHED")
    found = stored(old)
    assert (found.data.tags["before"], found.data.tags["after"]) == ("1", "1")
    assert found.info.status == "KILLED"
    assert stored(new).info.status == "FINISHED"
    assert not file.exists()
    assert len(capsys.readouterr().err.splitlines()) == 2  # what was wrong, and that the rest came
    assert len(lines(old, "refused.jsonl")) >= 2 - (not damage)


def test_an_old_run_of_which_nothing_can_be_read(begin, tmp_path, capsys):
    for name, content in {"a": b"\x00" * 50, "b": b"", "c": b"[1]\n[2]\n"}.items():
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "outbox.jsonl").write_bytes(content)
    (tmp_path / "runs" / "d" / "outbox.jsonl").mkdir(parents=True)
    begin()[0].finish("FINISHED")
    said = capsys.readouterr().err.splitlines()
    assert ["cannot be read" in line for line in said] == [True, True, False]
    assert "could not be sent" in said[2]


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("sqlite://", "keeps nothing"),
        ("sqlite:///:memory:", "keeps nothing"),
        ("sqlite:///file:x?mode=memory&uri=true", "keeps nothing"),
        ("sqlite+nope:///x", "sqlite.nope"),
        ("http://[::1", "this is no URI"),
        ("http://host:port", "this is no URI"),
        ("http://me:hidden@127.0.0.1:9", r"me:\*\*\*@127"),
        ("postgresql://me:hid@den@127.0.0.1:9/x", r"me:\*\*\*@127"),
    ],
)
def test_uris_that_record_nowhere_are_one_line(tmp_path, monkeypatch, uri, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says) as caught:
        MLflowRun(uri=uri).start({}, {})
    assert "hid" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["a\x00b", "x" * 5000, "x/" * 3000])
def test_folders_that_cannot_be_are_one_line(uri, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^output folder .* cannot be written") as caught:
        MLflowRun(uri=uri, folder=folder).start({}, {})
    assert len(str(caught.value)) < 1000
    assert not list(tmp_path.iterdir())


def test_passwords_are_not_shown():
    assert shown("postgresql+psycopg2://me:pa:s@s/x@host/db?sslpassword=y&a=b") == (
        "postgresql+psycopg2://me:***@host/db?sslpassword=***&a=b"
    )
    for plain in ("http://host:5000/a", "sqlite:////tmp/x.db", "http://me@host", "https://[::1]:5"):
        assert shown(plain) == plain
