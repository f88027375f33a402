"""`qrl fit --rerun`: a run is repeated from what MLflow holds of it."""

import os
import re
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.errors import UserError
from lightning_qrl.launch.provenance import environment_tags
from lightning_qrl.launch.rerun import Original
from lightning_qrl.recipe import load_recipe
from lightning_qrl.tracking import MLflowRun

SMALL = [
    "trainer.accelerator=cpu", "trainer.max_steps=2", "grpo.prompts_per_rollout=2",
    "grpo.group_size=4", "callbacks.held_out_evaluation.prompts=8", "seed=3",
]  # fmt: skip


def where(folder: Path) -> str:
    """In full: MLflow keeps what a name meant in the folder that it was first used in."""
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rerun")


@pytest.fixture(autouse=True)
def here(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", where(folder))


@pytest.fixture(scope="module")
def original(folder, tiny_policy) -> str:
    """Id of a run with a policy that is a folder."""
    shutil.copytree(tiny_policy.name, folder / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", where(folder))
        fit("--recipe", "4bitter", *SMALL, f"policy.name={folder / 'tiny'}")
        (run,) = search()
    return run.info.run_id


def search():
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    return client.search_runs([e.experiment_id for e in client.search_experiments()])


def fit(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["fit", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_run_is_repeated_and_its_weights_are_the_same(original, folder):
    lines = fit("--rerun", original, "tracking.run_name=again").splitlines()
    assert lines[0] == f"repeats  run {original}"
    assert re.match(r"the code, |unknown  both runs have changes", lines[1])
    assert lines[-1] == f"weights  the same as those of run {original}"
    client = MlflowClient(where(folder))
    first, again = client.get_run(original), client.get_run(search()[0].info.run_id)
    assert again.info.run_name == "again"
    assert again.data.tags["qrl.rerun_of"] == original
    assert "qrl.rerun_of" not in first.data.tags
    assert again.data.tags["qrl.recipe_hash"] == first.data.tags["qrl.recipe_hash"]
    assert again.data.metrics["train/loss"] == first.data.metrics["train/loss"]
    for tag in ("torch", "lightning", "transformers", "torchao", "mlflow", "python", "version"):
        assert first.data.tags[f"qrl.{tag}"][0].isdigit()
    assert first.data.tags["qrl.device"]
    assert int(first.data.tags["qrl.threads"]) > 0


def test_what_differs_is_said():
    recipe = load_recipe("base")
    here = environment_tags(recipe)
    there = {**here, "qrl.torch": "1.0", "qrl.git_dirty": "true", "qrl.policy_sha256": "abc"}
    del there["qrl.threads"]
    run = Original("id", recipe, there)
    lines = run.differences({**here, "qrl.git_dirty": "true"})
    assert lines == [
        f"differs  torch: was 1.0, is {here['qrl.torch']}",
        f"differs  threads: was not recorded, is {here['qrl.threads']}",
        "unknown  both runs have changes that are in no commit",
    ]
    clean = {**here, "qrl.git_dirty": "false"}
    assert Original("id", recipe, clean).differences(clean) == []
    assert run.verdict("abc") == "weights  the same as those of run id"
    assert run.verdict("xyz") == "weights  other than those of run id"
    assert "the rerun has not ended with any" in run.verdict("")
    assert "run id has not ended with any" in Original("id", recipe, here).verdict("abc")


def refused(*arguments: str) -> str:
    before = len(search())
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["fit", *arguments], catch_exceptions=False)
    assert len(search()) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_rerun_takes_nothing_that_would_make_it_another_run(original):
    assert "seed=4 would make it another one" in refused("--rerun", original, "seed=4")
    for more in (["--recipe", "base"], ["--resume", "x"], ["--without", "bf16_tail"]):
        assert "repeats a run as it was" in refused("--rerun", original, *more)


def test_runs_that_cannot_be_repeated(original, folder):
    assert refused("--rerun", "nobody").startswith("no run nobody at")
    bare = MLflowRun("tests", "bare")
    bare.start({}, {})
    bare.finish("FINISHED")
    assert "has no artefact recipe.yaml" in refused("--rerun", "bare")
    shutil.move(folder / "tiny", folder / "away")
    try:
        assert "tiny: there is no such folder" in refused("--rerun", original)
    finally:
        shutil.move(folder / "away", folder / "tiny")


def test_a_dry_rerun_prints_the_recipe(original):
    assert "max_steps: 2" in fit("--rerun", original, "--dry-run")
