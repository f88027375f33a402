"""`qrl compare`: what it finds, prints and writes."""

import csv
import json
import subprocess
import sys

import pytest
from recorded import Store, learning
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.errors import UserError


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    store = Store(tmp_path_factory.mktemp("store"))
    store.parent = store.add("ablate-4bitter", {}, tags={"qrl.kind": "ablation"})
    for a, arm in enumerate(("full", "without bf16_tail")):
        for seed in range(3):
            tags = {
                "mlflow.parentRunId": store.parent, "qrl.arm": arm, "qrl.seed": str(seed),
                "qrl.recipe_hash": arm, "qrl.recipe": "4bitter",
            }  # fmt: skip
            metrics = learning(10 * a + seed, 40, shift=-0.2 * a)
            store.add(f"{arm}-seed{seed}", metrics, tags=tags, texts={"recipe.yaml": f"a: {a}\n"})
    return store


@pytest.fixture(autouse=True)
def here(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    return tmp_path


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["compare", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["compare", *arguments], catch_exceptions=False)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_newest_ablation_as_a_table():
    lines = printed().splitlines()
    assert lines[0] == "ablate-4bitter"
    (row,) = [line for line in lines[2:5] if line.startswith("without bf16_tail")]
    assert row.endswith("]*")


def test_an_experiment_another_baseline_a_threshold_and_a_further_metric():
    read = json.loads(
        printed("lightning_qrl", "--baseline", "without bf16_tail", "--threshold", "0.5",
                "--metric", "train/kl", "--format", "json")
    )  # fmt: skip
    assert (read["title"], read["baseline"]) == ("experiment lightning_qrl", "without bf16_tail")
    measures = {measure["key"]: measure for measure in read["measures"]}
    assert measures["steps_to_threshold"]["label"] == "steps to 0.500"
    assert "train/kl/mean" in measures
    rows = list(csv.DictReader(printed("--format", "csv").splitlines()))
    assert {row["arm"] for row in rows} == {"full", "without bf16_tail"}


def test_what_is_refused_in_one_line(here):
    assert refused("ablate-4biter").startswith("no experiment and no run ablate-4biter at ")
    assert "--metric train/kll: no run of" in refused("--metric", "train/kll")
    assert "the nearest are train/kl," in refused("--metric", "train/kll")
    assert "there is no such arm; the nearest are full" in refused("--baseline", "fulll")
    for file in ("page.txt", "none/page.html"):
        assert f"--html {file}" in refused("no such experiment", "--html", file)
    for threshold in ("nan", "inf"):
        assert f"finite number, got {threshold}" in refused("--threshold", threshold)
    assert not list(here.iterdir())


def test_an_empty_database_stays_empty(here, monkeypatch):
    (here / "mlflow.db").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert "mlflow.db has no runs" in refused()
    assert (here / "mlflow.db").stat().st_size == 0


@pytest.mark.parametrize("name", ["bob's run", "both ' and \"", "100%_a"])
def test_a_run_is_found_whatever_its_name(store, name):
    store.add(name.replace("_", "x").replace("%", "% "), learning(0), experiment="names")
    store.add(name, learning(1), experiment="names")
    store.add(name.replace("_", "x").replace("%", "% "), learning(0), experiment="names")
    assert printed(name).splitlines()[0] == name


def test_figures_that_cannot_be_stored_are_a_line(store, here):
    (store.file.parent / "artifacts").mkdir(exist_ok=True)
    (store.file.parent / "artifacts" / "blocked").write_text("a file, where a folder should be")
    parent = store.add("blocked", {}, experiment="blocked")
    tags = {"mlflow.parentRunId": parent}
    for seed in range(2):
        store.add(f"a-seed{seed}", learning(seed, 20), experiment="blocked", tags=tags)
    done = CliRunner().invoke(app, ["compare", parent, "--html", "page.html"])
    assert done.exit_code == 0, done.exception
    assert done.stderr.startswith("figures not logged: ")
    assert done.stderr.count("\n") == 1
    assert (here / "page.html").exists()
    assert "page  page.html" in done.stdout


IN_A_PROCESS = """
import sys
from lightning_qrl.cli import main
sys.argv = ["qrl", "compare", "--html", "page.html"]
try:
    main()
except SystemExit as end:
    assert not end.code
sys.exit("torch" in sys.modules)
"""


def test_the_page_and_its_figures_without_torch(store, here):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or "qrl compare imports torch"
    assert done.stderr == ""
    page = (here / "page.html").read_text()
    assert "without bf16_tail" in page
    assert "a: 1" in page  # of the recipes' difference
    figures = [file.path for file in store.client.list_artifacts(store.parent, "comparison")]
    assert figures
    assert all(path.endswith(".png") for path in figures)
