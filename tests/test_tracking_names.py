"""Whatever a parameter, a metric or a tag is called, MLflow has it under a name of its own."""

import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient

from lightning_qrl.errors import UserError
from lightning_qrl.tracking import MLflowRun
from lightning_qrl.tracking.names import KEY_LIMIT, Names, folder_name, mlflow_params


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> MLflowRun:
    folder = tmp_path_factory.mktemp("names")
    run = MLflowRun("tests", "names", f"sqlite:///{folder}/mlflow.db", folder=str(folder / "runs"))
    run.start({}, {})
    return run


names = st.one_of(
    st.text(max_size=20),
    st.text("a@|/._ :-", min_size=1, max_size=8),
    st.text("ab@", min_size=245, max_size=260),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, st.floats(), min_size=1, max_size=8), st.integers(0, 10**6))
def test_metrics_of_any_name_and_value_are_there(run, metrics, step):
    metrics.pop("epoch", None)
    run.log_metrics(metrics, step)
    client = MlflowClient(run.uri)
    stored = client.get_run(run.run_id).data.metrics
    for name, value in metrics.items():
        key = run._names.key(name)
        assert key in stored
        limit = sys.float_info.max  # MLflow's infinity
        expected = value if math.isnan(value) else min(max(value, -limit), limit)
        last = [m.value for m in client.get_metric_history(run.run_id, key) if m.step == step]
        assert any(v == expected or (math.isnan(v) and math.isnan(expected)) for v in last)


values = st.one_of(st.text(), st.characters(codec=None).map(lambda c: c * 6001), st.floats())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, values, max_size=120))
def test_parameters_of_any_name_and_value_are_there(run, params):
    again = MLflowRun("tests", "params", run.uri, folder=str(run.root))
    again._client = run._client
    again.start(params, {})
    assert not (again.run_folder / "refused.jsonl").exists()
    stored = MlflowClient(run.uri).get_run(again.run_id).data.params
    assert stored == mlflow_params(params)
    assert len(stored) == len(params)
    again.finish("FINISHED")


def test_a_name_that_needs_no_change_keeps_itself():
    params = mlflow_params({"a@b": 1, "a_b": 2, "a|b": 3})
    assert params["a_b"] == "2"
    assert sorted(params.values()) == ["1", "2", "3"]


def test_a_value_that_is_cut_says_so():
    cut = mlflow_params({"long": "v" * 7000, "whole": "v" * 6000})
    assert len(cut["long"]) == 6000
    assert cut["long"].endswith("... (cut; whole in recipe.yaml)")
    assert cut["whole"] == "v" * 6000


@given(st.lists(names, unique=True, max_size=12), st.randoms())
def test_a_resumed_run_names_as_before_in_whatever_order(tmp_path_factory, given, random):
    file = tmp_path_factory.mktemp("keys") / "names.json"
    first = Names(file)
    before = {name: first.key(name) for name in given}
    assert len(set(before.values())) == len(given)
    assert all(0 < len(key) <= KEY_LIMIT for key in before.values())
    random.shuffle(given)
    # what needed no change is not in the file: it keeps itself, unless another name has taken that
    again = Names(file)
    changed = [name for name in given if before[name] != name]
    assert [again.key(name) for name in changed] == [before[name] for name in changed]
    assert {name: again.key(name) for name in given} == before


def test_what_odd_names_meant_is_an_artefact(run):
    again = MLflowRun("tests", "odd", run.uri, folder=str(run.root))
    again._client = run._client
    again.start({}, {})
    again.log_metrics({"pass@8": 1.0, "pass|8": 2.0, "plain": 3.0}, 1)
    again.finish("FINISHED")
    client = MlflowClient(run.uri)
    kept = json.loads(Path(client.download_artifacts(again.run_id, "names.json")).read_text())
    stored = client.get_run(again.run_id).data.metrics
    assert {kept.get(key, key): value for key, value in stored.items()} == {
        "pass@8": 1.0, "pass|8": 2.0, "plain": 3.0,
    }  # fmt: skip


def test_more_metrics_and_longer_requests_than_mlflow_takes_at_once(run):
    run.log_metrics({f"many/{i}": float(i) for i in range(2500)}, 1)
    stored = MlflowClient(run.uri).get_run(run.run_id).data.metrics
    assert all(stored[f"many/{i}"] == i for i in range(2500))
    again = MLflowRun("tests", "many", run.uri, folder=str(run.root))
    again._client = run._client
    again.start({f"p{i}": "é" * 6000 for i in range(150)}, {})  # 5 megabytes in JSON
    assert len(MlflowClient(run.uri).get_run(again.run_id).data.params) == 150
    again.finish("FINISHED")


def test_folders_have_names_that_a_disk_takes(tmp_path):
    for name in ("é" * 250, "a/../b", "..", "x" * 250, "\n"):
        folder = tmp_path / folder_name(name, "0" * 8)
        folder.mkdir()
        assert folder.parent == tmp_path


@pytest.mark.parametrize(
    "arguments", [{"experiment": "x" * 501}, {"run_name": "x" * 251}, {"run_name": "a\ud800"}]
)
def test_names_of_runs_and_experiments_that_mlflow_refuses(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}: expected a text of at most"):
        MLflowRun(**arguments)


def test_an_experiment_that_was_deleted_is_one_line(run):
    client = MlflowClient(run.uri)
    client.delete_experiment(client.create_experiment("gone"))
    again = MLflowRun("gone", "x", run.uri, folder=str(run.root))
    with pytest.raises(UserError, match=r"'gone' was deleted; set tracking\.experiment, or bring"):
        again.start({}, {})
