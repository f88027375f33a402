"""Reading runs back: which ones, and their whole histories as they were logged."""

import math

import numpy as np
import pytest
from mlflow.entities import Metric
from recorded import Store

from lightning_qrl.errors import UserError
from lightning_qrl.tracking.histories import read_histories
from lightning_qrl.tracking.notebook import History, select_runs


def series(*values) -> History:
    return History(np.arange(len(values)), np.array(values, dtype=float))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """An ablation, a fit of our own, and a run of someone else's."""
    store = Store(tmp_path_factory.mktemp("store"))
    parent = store.add("ablate-4bitter", {}, tags={"qrl.kind": "ablation"})
    children = [
        store.add(f"{arm}-seed{seed}", {"eval/reward": series(seed, 1)}, params={"lr": "1"},
                  tags={"mlflow.parentRunId": parent, "qrl.arm": arm, "qrl.seed": str(seed)},
                  texts={"recipe.yaml": f"seed: {seed}\n", "deep/er.txt": "no"})
        for arm in ("full", "empty")
        for seed in (0, 1)
    ]  # fmt: skip
    store.add("mine", {"train/reward": series(1)})
    store.add("theirs_s1", {"reward": series(2)}, experiment="theirs")
    store.tag(children[0], qrl__replaced_by=children[1])
    store.client.delete_run(children[3])
    store.parent, store.children = parent, children
    return store


def names(store, *asked) -> list[str]:
    return [run.name for run in select_runs(store.uri, asked).read(())]


def test_what_is_selected(store):
    """Not what was deleted, what was replaced, and what is a parent."""
    ablation = ["full-seed1", "empty-seed0"]
    assert names(store) == ablation
    assert names(store, "ablate-4bitter") == names(store, store.parent) == ablation
    assert names(store, "lightning_qrl") == [*ablation, "mine"]
    assert names(store, "theirs", "mine", "theirs_s1") == ["mine", "theirs_s1"]
    assert select_runs(store.uri, ()).parents == (store.parent,)
    both = select_runs(store.uri, ("theirs", "ablate-4bitter"))
    assert both.title == "experiment theirs, ablate-4bitter"
    assert both.metrics == {"eval/reward", "reward"}
    assert select_runs(store.uri, ("theirs",)).parents == ()


def test_what_a_run_is_read_as(store):
    run = select_runs(store.uri, ("full-seed1",)).read(
        ["eval/reward", "train/reward"], ["recipe.yaml", "plan.txt"]
    )[0]
    assert (run.id, run.experiment, run.status) == (store.children[1], "lightning_qrl", "FINISHED")
    assert (run.tags["qrl.arm"], run.params, run.texts) == (
        "full", {"lr": "1"}, {"recipe.yaml": "seed: 1\n"},
    )  # fmt: skip
    assert list(run.metrics) == ["eval/reward"]
    np.testing.assert_array_equal(run.metrics["eval/reward"].values, [1, 1])
    assert run.started <= run.ended
    assert run.link == ""


def test_histories_are_what_was_logged(store):
    """By MLflow's own client, out of order, a step twice, with values that are not finite."""
    client = store.client
    run = client.create_run("0", run_name="odd").info.run_id
    other = client.create_run("0", run_name="odd too").info.run_id
    logged = [(3, 0.3, 10), (1, math.inf, 20), (3, math.nan, 30), (2, -math.inf, 40), (1, 0.1, 5)]
    client.log_batch(run, [Metric("x", y, at, step) for step, y, at in logged])
    client.log_batch(run, [Metric("y", 1e300, 1, 0)])
    client.log_batch(other, [Metric("x", 7.0, 1, -1)])
    asked = {run: ["x", "y"], other: ["x"]}
    ways = [
        read_histories(client, store.uri, asked),
        read_histories(client, "http://as.of.a.server", asked),  # the client still has the file
    ]
    for found in ways:
        np.testing.assert_array_equal(found[run]["x"].steps, [1, 2, 3])
        np.testing.assert_array_equal(found[run]["x"].values, [math.inf, -math.inf, math.nan])
        np.testing.assert_array_equal(found[run]["y"].values, [1e300])
        assert found[other]["x"].steps.tolist() == [-1]
        assert found[run]["x"].steps.dtype == np.int64


def test_a_metric_without_a_row_has_an_empty_history(store):
    """A database that was cut off may hold a metric's name and none of its values."""
    run = store.add("cut", {"x": series(1)})
    for uri in (store.uri, "http://as.of.a.server"):
        found = read_histories(store.client, uri, {run: ["gone", "x"]})[run]
        assert [part.tolist() for part in found["gone"]] == [[], []]
        assert found["x"].values.tolist() == [1]


def test_many_histories_are_what_the_client_gives(store):
    """Over several queries: more rows than are fetched at once."""
    made = {f"m{i}": History(np.arange(400), np.random.default_rng(i).random(400)) for i in (0, 1)}
    runs = [store.add(f"long{i}", made, experiment="long") for i in range(3)]
    found = read_histories(store.client, store.uri, dict.fromkeys(runs, ["m0", "m1"]))
    for run in runs:
        for name, history in made.items():
            np.testing.assert_array_equal(found[run][name], history)
            entries = store.client.get_metric_history(run, name)
            assert [entry.value for entry in entries] == found[run][name].values.tolist()


def test_a_folder_is_attached_to_the_parent(store, tmp_path):
    (tmp_path / "curve.png").write_bytes(b"png")
    select_runs(store.uri, ()).attach(tmp_path, "comparison")
    (file,) = store.client.list_artifacts(store.parent, "comparison")
    assert file.path == "comparison/curve.png"


def test_what_is_not_there(store, tmp_path):
    with pytest.raises(UserError, match="no experiment and no run their at .*; the nearest are th"):
        select_runs(store.uri, ["their"])
    with pytest.raises(UserError, match="there is no .*none.db; set MLFLOW_TRACKING_URI"):
        select_runs(f"sqlite:///{tmp_path}/none.db", [])
    assert not list(tmp_path.iterdir())
    store.client.create_experiment("bare")
    with pytest.raises(UserError, match="experiment bare at .* has no runs yet"):
        select_runs(store.uri, ["bare"])
