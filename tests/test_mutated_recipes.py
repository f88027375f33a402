"""Recipes mutated at random: each runs, or ends in one line with exit code 2."""

import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mutations import mutated

from lightning_qrl import cli
from lightning_qrl.recipe import load_recipe

SMALL = [
    "policy.init=random", "trainer.accelerator=cpu", "trainer.max_steps=2",
    "grpo.prompts_per_rollout=2", "grpo.group_size=4",
    "callbacks.held_out_evaluation.prompts=2",
    "callbacks.checkpoint.every_n_epochs=1",
]  # fmt: skip
NAMES = ["4bitter", "nvfp4_pretraining", "fp16", "4bitter_async"]


@pytest.fixture
def qrl(tmp_path, monkeypatch, capfd):
    """Runs `qrl` in this process; gives its exit code and what it wrote on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["qrl", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capfd.readouterr().err

    return run


def recipe_of(seed: int) -> tuple[str, str]:
    return mutated(load_recipe(NAMES[seed % len(NAMES)], SMALL).values, seed)


def check(qrl, seed: int) -> bool:
    """Whether a mutated recipe passes the checks; if not, it was refused as it should be."""
    text, done = recipe_of(seed)
    Path("mutated.yaml").write_bytes(text.encode())
    code, errors = qrl("fit", "-r", "mutated.yaml", "--dry-run")
    said = [line for line in errors.splitlines() if line.startswith("qrl: ")]
    assert [path.name for path in Path().iterdir()] == ["mutated.yaml"], (seed, done)
    assert code in (0, 2), (seed, done, errors)
    assert len(said) == (code == 2), (seed, done, errors)
    assert "Traceback" not in errors, (seed, done)
    return code == 0


def test_a_few_mutated_recipes(qrl):
    passed = [seed for seed in range(25) if check(qrl, seed)]
    assert 0 < len(passed) < 25


@pytest.mark.slow
def test_300_mutated_recipes(qrl):
    passed = [seed for seed in range(300) if check(qrl, seed)]
    assert 30 < len(passed) < 270
    for seed in passed[::6]:
        text, done = recipe_of(seed)
        Path("mutated.yaml").write_bytes(text.encode())
        code, errors = qrl(
            "fit", "-r", "mutated.yaml", "tracking.uri=sqlite:///m.db", "trainer.max_steps=2"
        )
        assert code in (0, 2), (seed, done, errors)
    client = MlflowClient("sqlite:///m.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert {run.info.status for run in runs} <= {"FINISHED", "FAILED"}
