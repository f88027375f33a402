"""`qrl doctor`: what it finds, what it says about it, and its exit codes."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.formats import format_names, get_format
from lightning_qrl.launch import doctor
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.precision.backends.base import Chip

PROBES = ["constant", "observation", "bandit", "delayed", "contextual"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def examined(*arguments):
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done, json.loads(done.stdout) if "json" in arguments else done.stdout


def by_what(report):
    return {finding["what"]: finding for finding in report["machine"]}


def test_all_probes_pass_and_nothing_is_left_behind(tmp_path):
    done, report = examined("--format", "json")
    assert [(p["name"], p["passed"], p["suspect"]) for p in report["probes"]] == [
        (name, True, "") for name in PROBES
    ]
    assert report["well"]
    assert done.exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_every_low_precision_format_is_in_one_line():
    _, report = examined("--no-probes", "--format", "json")
    lines = [f for f in report["machine"] if f["what"].startswith(("native", "emulated"))]
    named = [name for line in lines for name in line["value"].partition(" (")[0].split()]
    assert sorted(named) == [name for name in format_names() if get_format(name).bits < 16]
    assert len({line["value"].partition(" (")[2] for line in lines}) == len(lines)
    assert report["probes"] == []


def test_what_a_chip_has_is_asked_of_the_backends(monkeypatch):
    """A chip with FP8 units, where the agreement test cannot run: the reason is the test's."""
    monkeypatch.setattr(doctor, "find_chip", lambda: Chip("a chip", (9, 0)))
    lines = {f.value for f in doctor.examine() if f.what == "emulated"}
    assert any(line.startswith("fp8_e4m3 (its test failed: ") for line in lines)
    assert "nvfp4 (a chip has no NVFP4 units)" in lines


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("http://127.0.0.1:9", "does not answer"),
        ("sqlite:////nowhere/at/all.db", "cannot be written"),
        ("./mlruns", "filesystem"),
    ],
)
def test_an_mlflow_that_cannot_be_reached_is_broken(uri, says, monkeypatch, tmp_path):
    if uri.startswith("sqlite") and os.access("/", os.W_OK):
        (tmp_path / "file").touch()
        uri = f"sqlite:///{tmp_path}/file/all.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    done, report = examined("--no-probes", "--format", "json")
    assert done.exit_code == 1
    assert not report["well"]
    assert by_what(report)["MLflow"]["broken"]
    assert says in by_what(report)["MLflow"]["value"]


def test_a_folder_that_cannot_be_written_is_broken(tmp_path):
    (tmp_path / "runs").touch()
    done, text = examined("--no-probes")
    assert done.exit_code == 1
    assert f"output folder {tmp_path / 'runs'} cannot be written" in text
    assert text.splitlines()[-1] == "broken: disk"


def test_a_failed_probe_says_what_to_suspect(monkeypatch):
    reduce = Dapo.reduce
    monkeypatch.setattr(Dapo, "reduce", lambda *args: -reduce(*args))
    monkeypatch.setattr(doctor, "PROBES", doctor.PROBES[2:3])
    done, text = examined()
    assert done.exit_code == 1
    assert "cosine -1.000" in text
    assert "> suspect the policy loss: its sign" in text
    assert text.splitlines()[-1] == "probes failed: bandit"


def test_a_probe_that_cannot_run_has_failed(monkeypatch):
    def raises(*args):
        raise RuntimeError("no reduction\nin this build")

    monkeypatch.setattr(Dapo, "reduce", raises)
    monkeypatch.setattr(doctor, "PROBES", doctor.PROBES[:2])
    done, text = examined()
    assert done.exit_code == 1
    assert "> it runs: RuntimeError: no reduction\n" in text
    last = "probes failed: constant, observation; begin with constant, the others stand on it"
    assert text.splitlines()[-1] == last


def test_threads_beyond_the_cores_are_worth_a_word(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 5)
    done, text = examined("--no-probes")
    assert "OMP_NUM_THREADS=1" in text
    assert done.exit_code == 0


def test_an_unknown_format_is_a_bad_argument():
    assert examined("--format", "xml")[0].exit_code == 2


def test_its_help_imports_no_torch():
    code = (
        "import sys\nfrom lightning_qrl.cli import main\nsys.argv = ['qrl', 'doctor', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\nassert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Example: qrl doctor" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["", "/bin/false"])
def test_the_compiler_is_tried(compiler):
    code = (
        "import sys\nfrom lightning_qrl.cli import main\n"
        "sys.argv = ['qrl', 'doctor', '--no-probes', '--format', 'json']\nmain()"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCH_COMPILE_DISABLE", "CXX")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False,
        env=environment | ({"CXX": compiler} if compiler else {}),
    )  # fmt: skip
    found = by_what(json.loads(done.stdout))["compiler"]
    if compiler:
        assert "compute uncompiled" in found["value"]
        assert "install a C++ compiler" in found["remedy"]
    else:
        assert found["value"].startswith("a compiled kernel runs")
    assert done.returncode == 0
