"""A metric's series is read back as it was logged, from any run."""

import math

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from lightning_qrl.errors import UserError
from lightning_qrl.tracking import MLflowRun, read_series


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> MLflowRun:
    folder = tmp_path_factory.mktemp("mlflow")
    run = MLflowRun("tests", "a run", f"sqlite:///{folder}/mlflow.db", folder=str(folder / "runs"))
    run.start({}, {})
    for step, reward in ((1, 0.25), (2, math.nan), (5, 0.5)):
        run.log_metrics({"train/reward": reward, "train/loss": 0.0}, step)
    return run


def test_a_series_is_what_was_logged(run):
    for name in (run.run_id, "a run", run.run_folder.name):
        steps, values = read_series(run.uri, name, "train/reward")
        np.testing.assert_array_equal(steps, [1, 2, 5])
        np.testing.assert_array_equal(values, [0.25, np.nan, 0.5])
        assert (steps.dtype, values.dtype) == (np.float64, np.float64)


def test_infinities_are_given_back(run):
    other = MLflowRun("tests", "infinite", run.uri, folder=str(run.root))
    other.start({}, {})
    other.log_metrics({"x": math.inf}, 1)
    other.log_metrics({"x": -math.inf}, 2)
    other.finish("FINISHED")
    assert read_series(run.uri, "infinite", "x")[1].tolist() == [math.inf, -math.inf]


def test_the_environment_names_the_server(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", run.uri)
    assert read_series(None, "a run", "train/loss")[1].tolist() == [0, 0, 0]


def test_a_foreign_run_out_of_order_and_with_a_step_twice(run):
    client = MlflowClient(run.uri)
    experiment = client.get_experiment_by_name("tests").experiment_id
    foreign = client.create_run(experiment, run_name="foreign").info.run_id
    logged = [(3, 0.3, 10), (1, 0.1, 20), (3, 0.35, 30), (2, 0.2, 40)]
    client.log_batch(foreign, [Metric("reward", y, at, step) for step, y, at in logged])
    steps, values = read_series(run.uri, "foreign", "reward")
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [0.1, 0.2, 0.35])


def test_an_unknown_metric_is_answered_with_near_names(run):
    with pytest.raises(UserError) as caught:
        read_series(run.uri, "a run", "train/rewards")
    message = str(caught.value)
    assert message.endswith("no metric 'train/rewards'; the nearest are train/reward, train/loss")


def test_an_unknown_run_is_answered_with_near_names(run, tmp_path):
    client = MlflowClient(run.uri)
    experiment = client.get_experiment_by_name("tests").experiment_id
    for _ in range(2):  # a name is given once however many runs have it
        client.create_run(experiment, run_name="zzz")
    with pytest.raises(UserError) as caught:
        read_series(run.uri, "a rnu", "train/reward")
    names = str(caught.value).removeprefix(f"no run a rnu at {run.uri}; the nearest are ")
    assert names.split(", ")[0] == "a run"
    assert names.split(", ").count("zzz") == 1
    empty = f"sqlite:///{tmp_path}/empty.db"
    MlflowClient(empty).search_experiments()
    with pytest.raises(UserError, match="no run x at .*; it has no runs$"):
        read_series(empty, "x", "train/reward")


def test_an_unknown_run_and_a_file_that_is_not_there(run, tmp_path):
    with pytest.raises(UserError, match="no run nobody at sqlite"):
        read_series(run.uri, "nobody", "train/reward")
    with pytest.raises(UserError, match="no run x: there is no"):
        read_series(f"sqlite:///{tmp_path}/none.db", "x", "train/reward")
    assert not list(tmp_path.iterdir())
