"""`qrl fit --rerun`: a run is repeated from what MLflow holds of it."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from lightning_qrl.build import build
from lightning_qrl.cli import app
from lightning_qrl.errors import UserError
from lightning_qrl.launch.provenance import environment_tags, source_tags
from lightning_qrl.launch.rerun import Original
from lightning_qrl.recipe import load_recipe
from lightning_qrl.tracking import MLflowRun

SMALL = [
    "trainer.accelerator=cpu", "trainer.max_steps=2", "grpo.prompts_per_rollout=2",
    "grpo.group_size=4", "callbacks.held_out_evaluation.prompts=8", "seed=3",
    "callbacks.checkpoint.every_n_epochs=2",
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
        named = f"policy.name={folder / 'tiny'}"
        fit("--recipe", "4bitter", "--without", "live_view", *SMALL, named)
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
    for run in (first, again):
        assert run.data.tags["qrl.removed"] == "live_view"
        assert set(json.loads(run.data.tags["qrl.sources"])) == {"policy"}  # the rest is ours
    assert again.data.tags["qrl.recipe_hash"] == first.data.tags["qrl.recipe_hash"]
    assert again.data.metrics["train/loss"] == first.data.metrics["train/loss"]
    for tag in ("torch", "lightning", "transformers", "torchao", "mlflow", "python", "version"):
        assert first.data.tags[f"qrl.{tag}"][0].isdigit()
    assert first.data.tags["qrl.device"] not in ("", "this CPU")
    assert int(first.data.tags["qrl.threads"]) > 0


def test_what_differs_is_said():
    recipe = load_recipe("base")
    here = environment_tags(recipe)
    there = {**here, "qrl.torch": "1.0", "qrl.git_dirty": "true", "qrl.policy_sha256": "abc"}
    del there["qrl.threads"]
    run = Original("id", recipe, there)
    lines = run.differences({**here, "qrl.git_dirty": "true"}, ())
    assert lines == [
        f"differs  torch: was 1.0, is {here['qrl.torch']}",
        f"differs  threads: was not recorded, is {here['qrl.threads']}",
        "unknown  both runs have changes that are in no commit",
    ]
    clean = {**here, "qrl.git_dirty": "false"}
    assert Original("id", recipe, clean).differences(clean, ()) == []
    assert run.verdict("abc") == "weights  the same as those of run id"
    assert run.verdict("xyz") == "weights  other than those of run id"
    assert "the rerun has not ended with any" in run.verdict("")
    assert "run id has not ended with any" in Original("id", recipe, here).verdict("abc")


def test_every_session_and_the_data_count():
    recipe = load_recipe("base")
    here = environment_tags(recipe)
    sources = '{{"task": "{0}", "callbacks.x": "b"}}'.format
    sessions = [{**here, "qrl.torch": old, "qrl.sources": sources("a")} for old in ("1.0", "2.0")]
    run = Original("id", recipe, here, sessions, {"train": "t", "held_out": "h"})
    now = {**here, "qrl.git_dirty": "false", "qrl.sources": sources("c")}
    data = [{"context": "train", "digest": "other"}, {"context": "held_out", "digest": "h"}]
    lines = [line for line in run.differences(now, data) if "git_dirty" not in line]
    assert lines == [
        "differs  data of train: was t, is other",
        f"differs  torch: was 1.0, then 2.0, is {here['qrl.torch']}",
        "differs  files of task: was a, is c",
    ]


OUTSIDE = "import lightning as L\n\nclass Watch(L.Callback):\n    pass\n"


def test_somebodys_file_and_a_policys_folder_are_digested(tmp_path, tiny_policy, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "qrl_test_outside.py"
    file.write_text(OUTSIDE)
    shutil.copytree(tiny_policy.name, tmp_path / "policy")
    own = "callbacks.watch={_target_: qrl_test_outside.Watch}"
    run = build(load_recipe("base", [f"policy.name={tmp_path / 'policy'}", own]))

    def sources() -> dict[str, str]:
        return json.loads(source_tags(run)["qrl.sources"])

    before = sources()
    assert set(before) == {"callbacks.watch", "policy"}
    assert sources() == before
    file.write_text(OUTSIDE + "# changed\n")
    with (tmp_path / "policy" / "config.json").open("a") as config:
        config.write(" ")
    assert all(sources()[key] != before[key] for key in before)


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
    continued = MLflowRun("tests", "continued")
    continued.start({}, {"qrl.resumed_from": "abc"})
    continued.finish("FINISHED")
    assert "qrl fit --recipe recipe.yaml --resume abc" in refused("--rerun", "continued")
    shutil.move(folder / "tiny", folder / "away")
    try:
        assert "tiny: there is no such folder" in refused("--rerun", original)
    finally:
        shutil.move(folder / "away", folder / "tiny")


def test_a_dry_rerun_prints_the_recipe(original):
    assert "max_steps: 2" in fit("--rerun", original, "--dry-run")


def test_a_run_that_goes_on_says_by_which_recipe_and_where(original, folder, tmp_path):
    client = MlflowClient(where(folder))
    before = client.get_run(original).data.tags
    fit("--resume", original, "trainer.max_steps=4")
    after = client.get_run(original).data.tags
    longer = load_recipe("4bitter", [*SMALL, "trainer.max_steps=4"], ["live_view"])
    longer.values["policy"]["name"] = str(folder / "tiny")
    assert after["qrl.recipe_hash"] == longer.hash() != before["qrl.recipe_hash"]
    assert (after["qrl.recipe"], after["qrl.removed"]) == ("4bitter", "live_view")
    file = client.download_artifacts(original, "sessions.json", str(tmp_path))
    sessions = json.loads(Path(file).read_text())
    assert [one["step"] for one in sessions] == [0, 2]
    hashes = [one["qrl.recipe_hash"] for one in sessions]
    assert hashes == [before["qrl.recipe_hash"], after["qrl.recipe_hash"]]
    assert all(one["qrl.torch"] == before["qrl.torch"] for one in sessions)
