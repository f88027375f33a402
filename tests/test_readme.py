"""Every `qrl` command of the README runs, shrunk to seconds where it trains."""

import re
import shlex
from pathlib import Path

import pytest
from recorded import Store, large_experiment
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.recipe import load_recipe

README = Path(__file__).parent.parent / "README.md"
SHRINK = [
    "trainer.max_steps=2",
    "grpo.prompts_per_rollout=2",
    "grpo.group_size=4",
    "callbacks.held_out_evaluation.prompts=8",
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(README.read_text()) if found == language]


def commands() -> list[str]:
    lines = (line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines())
    return [line for line in lines if line.startswith("qrl ")]


def test_readme_has_commands():
    assert len(commands()) >= 6


def marked(command):
    """An ablation is several processes, which take their time to begin."""
    slow = command.startswith("qrl ablate")
    return pytest.param(command, marks=pytest.mark.slow) if slow else command


@pytest.mark.parametrize("command", map(marked, commands()))
def test_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    arguments = shlex.split(command)[1:]
    if arguments[0] in ("fit", "ablate"):
        arguments += SHRINK
    if arguments[0] == "ablate":
        arguments += ["--drop", "bf16_tail", "--seeds", "1"]  # the last --seeds counts
    if arguments[0] == "compare":
        large_experiment(Store(tmp_path), arms=2, seeds=2, steps=10)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_the_recipe_shown_is_the_one_shipped(tmp_path):
    shown = tmp_path / "shown.yaml"
    shown.write_text(next(text for text in blocks("yaml") if "extends" in text))
    assert load_recipe(str(shown)).values == load_recipe("4bitter").values
