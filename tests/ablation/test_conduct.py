"""How an ablation is conducted, by processes that end at once: seeds, folders, signals, errors."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts

from lightning_qrl.ablation.ablate import ablate
from lightning_qrl.ablation.conduct import Signals
from lightning_qrl.ablation.design import Design, Wish, make_design
from lightning_qrl.ablation.job import Job
from lightning_qrl.ablation.locks import held
from lightning_qrl.errors import UserError
from lightning_qrl.tracking import tags
from lightning_qrl.tracking.family import Family
from lightning_qrl.tracking.notebook import select_runs

EXPERIMENT = "lightning_qrl"
ARMS = ["full", "empty"]


@dataclass
class AtOnce:
    """A launcher of processes that have finished their run as soon as they are started."""

    uri: str
    signal: int = 0  # that comes while the first one starts
    jobs: int = 1
    about: str = "at once"
    started: list[tuple[str, int]] = field(default_factory=list)

    def start(self, job: Job) -> "AtOnce":
        client = MlflowClient(self.uri)
        where = client.get_experiment_by_name(EXPERIMENT).experiment_id
        run = client.create_run(where, tags=job.tags, run_name=job.run_name)
        client.set_terminated(run.info.run_id, "FINISHED")
        if self.signal and not self.started:
            os.kill(os.getpid(), self.signal)
        self.started.append(job.key)
        return self

    def poll(self) -> int:
        return 0

    def stop(self) -> None:
        pass

    kill = stop


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory) -> Path:
    """Seconds to make, and copied in none."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    Family(f"sqlite:///{file}", EXPERIMENT)
    return file


@pytest.fixture
def uri(empty_database, tmp_path, monkeypatch) -> str:
    (tmp_path / "here").mkdir()
    shutil.copy(empty_database, tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def design(seeds: int = 1) -> Design:
    return make_design("4bitter", (), Wish(seeds=seeds), lambda recipe: ["forward_quantization"])


def run(uri: str, seeds: int = 1, signal: int = 0) -> tuple[int, list[tuple[str, int]]]:
    """The exit code, and what was started."""
    launcher = AtOnce(uri, signal)
    code = ablate(design(seeds), lambda given: launcher)
    return code, launcher.started


def parents(uri: str) -> list:
    client = MlflowClient(uri)
    where = client.get_experiment_by_name(EXPERIMENT).experiment_id
    return list(client.search_runs([where], f"tags.`{tags.KIND}` = '{tags.ABLATION}'"))


def recorded_seeds(uri: str) -> list[int]:
    (parent,) = parents(uri)
    where = {"run_id": parent.info.run_id, "tracking_uri": uri}
    file = Path(download_artifacts(artifact_path="design.json", **where))
    return json.loads(file.read_text())["seeds"]


def test_more_seeds_are_added_and_fewer_change_nothing(uri, capsys):
    assert run(uri, 1) == (0, [(arm, 0) for arm in ARMS])
    assert recorded_seeds(uri) == [0]
    assert run(uri, 3) == (0, [(arm, seed) for seed in (1, 2) for arm in ARMS])
    assert "continued: 2/6 done" in capsys.readouterr().out
    assert recorded_seeds(uri) == [0, 1, 2]
    assert run(uri, 1) == (0, [])
    assert "as they are: the runs with seed 1, 2" in capsys.readouterr().out
    assert recorded_seeds(uri) == [0, 1, 2]
    (parent,) = parents(uri)
    assert parent.info.status == "FINISHED"
    compared = select_runs(uri, [parent.info.run_id]).read([])
    keys = {(run.tags[tags.ARM], int(run.tags[tags.SEED])) for run in compared}
    assert keys == {(arm, seed) for arm in ARMS for seed in range(3)}


def test_it_goes_on_in_its_folder_wherever_it_is_started(uri, tmp_path, monkeypatch):
    run(uri)
    folder = Path(parents(uri)[0].data.tags[tags.FOLDER])
    assert folder.parent == tmp_path / "here" / "runs"
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    with (
        held(folder / "lock", wait=False),
        pytest.raises(UserError, match=f"running already; its logs are in {folder}"),
    ):
        run(uri, 2)
    assert run(uri, 2) == (0, [(arm, 1) for arm in ARMS])
    assert list((tmp_path / "there").iterdir()) == []
    (job,) = folder.glob("*full-seed1.yaml")
    assert f"folder: {folder.parent}" in job.read_text()


def test_it_takes_another_folder_if_its_own_is_gone(uri):
    run(uri)
    folder = Path(parents(uri)[0].data.tags[tags.FOLDER])
    folder.rename(folder.with_name("moved"))
    assert run(uri) == (0, [])
    assert folder.is_dir()


def test_a_start_at_the_same_moment_elsewhere_is_refused(uri, tmp_path):
    own = {tags.DESIGN: "d", tags.FOLDER: str(tmp_path)}
    first, second = Family(uri, EXPERIMENT), Family(uri, EXPERIMENT)
    assert not first.open("a", own)
    with pytest.raises(UserError, match=f"just been started elsewhere, in {tmp_path}"):
        second.open("a", {**own, tags.FOLDER: "elsewhere"})
    assert second.parent == ""


def test_what_the_disk_refuses_is_one_line_and_the_parent_has_failed(uri):
    run(uri)
    folder = Path(parents(uri)[0].data.tags[tags.FOLDER])
    (file,) = folder.glob("*full-seed0.yaml")
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError) as error:
        run(uri)
    assert str(error.value) == f"ablation stopped: {file}: Is a directory"
    assert [parent.info.status for parent in parents(uri)] == ["FAILED"]


@pytest.fixture(autouse=True)
def _not_under_nohup():
    """Tests that run under nohup would ignore what these send."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_it(uri, capfd, number):
    assert run(uri, 2, number) == (128 + number, [("full", 0)])
    assert "go on   the same command again" in capfd.readouterr().out
    assert [parent.info.status for parent in parents(uri)] == ["KILLED"]
    assert run(uri, 2)[0] == 0


def test_under_nohup_the_end_of_the_session_does_not_stop_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = Signals()
        with signals.counted():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


IN_A_TERMINAL = """
import fcntl, os, termios, time
from pathlib import Path
from lightning_qrl.ablation.conduct import Signals
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signals = Signals()
with signals.counted():
    Path("ready").touch()
    while not signals.count:
        time.sleep(0.05)
    os.kill(os.getpid(), signals.last)  # as a shell does
    print("nobody reads this", flush=True)
    Path("stopped").write_text(f"{signals.count} signal, number {signals.last}")
"""


def test_a_terminal_that_is_closed_takes_no_words_and_spoils_nothing(tmp_path):
    ours, theirs = pty.openpty()
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL], cwd=tmp_path, start_new_session=True, **ends
    )
    os.close(theirs)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "stopped").read_text() == f"1 signal, number {int(signal.SIGHUP)}"


def test_no_file_holds_the_tracking_servers_uri(uri):
    """It may hold a password; the process is told by its environment."""
    run(uri)
    files = list(Path(parents(uri)[0].data.tags[tags.FOLDER]).iterdir())
    assert len(files) >= 2 * len(ARMS)
    assert not [file for file in files if uri in file.read_text()]


def test_a_deleted_experiment_is_said_and_nothing_is_left(uri, tmp_path):
    client = MlflowClient(uri)
    client.delete_experiment(client.create_experiment(EXPERIMENT))
    with pytest.raises(UserError, match=f"experiment '{EXPERIMENT}' was deleted"):
        run(uri)
    assert list((tmp_path / "here").iterdir()) == []
