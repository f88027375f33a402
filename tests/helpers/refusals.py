"""Bad input through the console script: one line on stderr, exit code 2, nothing left behind."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_qrl import cli


def refusal(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *command: str,
) -> Callable[..., str]:
    """Runs `qrl` with a command and arguments that it must refuse; gives the line."""

    def run(*arguments: str) -> str:
        before = sorted(folder.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["qrl", *command, *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capfd.readouterr()
        assert end.value.code == 2, err
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("qrl: ")
        assert sorted(folder.rglob("*")) == before
        return line.removeprefix("qrl: ")

    return run
