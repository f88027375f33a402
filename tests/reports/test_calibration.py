"""Recorded runs as a calibration reads them."""

import numpy as np
import pytest
from recorded import Store, recorded

from lightning_qrl.errors import UserError
from lightning_qrl.reports.calibration import METRICS, observed
from lightning_qrl.tracking.notebook import History, select_runs

STEPS = np.arange(1, 21)


def metrics(lag=0.0, mean=None):
    """Of a run with a constant lag, without a ramp."""
    low = f"{int(lag)}" if lag < 8 else "8_15"
    made = {
        "train/sampling/sampling_logp_difference/mean": np.linspace(0.1, 0.2, 20),
        "train/reward": np.linspace(0.3, 0.9, 20),
        "async/staleness_mean": np.full(20, lag if mean is None else mean),
        f"async/staleness/lag_{low}": np.ones(20),
        "async/discarded": np.full(20, 2.0),
        "timing_s/gen": np.full(20, 0.5),
        "timing_s/update_actor": np.full(20, 0.25),
        "train/num_tokens": 100.0 * STEPS,
    }
    found = {name: History(STEPS, values) for name, values in made.items()}
    found["eval/reward"] = History(np.array([0, 10, 20]), np.array([0.3, 0.6, 0.9]))
    return found


def test_a_stored_run_is_read_back(tmp_path):
    store = Store(tmp_path)
    tags = {"qrl.recipe": "fp8", "qrl.recipe_hash": "abc", "qrl.seed": "3"}
    params = {
        "seed": "3", "optimizer.lr": "0.0001", "rollout.max_staleness": "2",
        "grpo.prompts_per_rollout": "8", "grpo.group_size": "16", "tracking.experiment": "tests",
        "callbacks.forward_quantization.format": "fp8_e4m3",
        "callbacks.held_out_evaluation.prompts": "512",
    }  # fmt: skip
    store.add("run", metrics(2.0), experiment="e", tags=tags, params=params)
    (run,) = select_runs(store.uri, ["e"]).read(METRICS)
    found = observed(run)
    assert (found.recipe, found.setting, found.seed, found.batch) == ("fp8", "abc", 3, 8)
    assert found.plan_text == "callbacks.forward_quantization.format=fp8_e4m3"
    assert dict(found.alike) == {
        "optimizer.lr": "0.0001", "grpo.prompts_per_rollout": "8", "grpo.group_size": "16"
    }  # fmt: skip
    assert found.group_size == 16
    assert found.lags == (((2.0, 1.0),),) * 20
    assert found.mismatch[0] == 0.1
    assert found.reward[-1] == 0.9
    assert found.held_out == ((0, 0.3), (10, 0.6), (20, 0.9))
    assert found.tokens == (100.0,) * 20
    assert (found.discarded, found.sampling_seconds[0], found.update_seconds[0]) == (40, 0.5, 0.25)


def test_a_lag_within_a_bucket_comes_from_the_mean():
    assert observed(recorded("run", metrics(8.0, mean=13.0))).lags[0] == ((13.0, 1.0),)


def test_several_lags_of_a_step_have_their_shares():
    found = metrics(1.0)
    found["async/staleness/lag_1"] = History(STEPS, np.full(20, 0.25))
    found["async/staleness/lag_8_15"] = History(STEPS, np.full(20, 0.75))
    found["async/staleness_mean"] = History(STEPS, np.full(20, 0.25 + 0.75 * 10))
    assert observed(recorded("run", found)).lags[0] == ((1.0, 0.25), (10.0, 0.75))


def test_a_run_that_came_apart_is_read_up_to_there():
    found = metrics()
    values = found["train/reward"].values.copy()
    values[15:] = np.nan
    found["train/reward"] = History(STEPS, values)
    run = observed(recorded("run", found))
    assert len(run.mismatch) == len(run.lags) == 15
    assert run.held_out == ((0, 0.3), (10, 0.6))


def test_a_bucket_that_was_logged_for_fewer_steps_is_read_as_far_as_it_goes():
    found = metrics(1.0)
    found["async/staleness/lag_2"] = History(STEPS[:5], np.zeros(5))
    assert observed(recorded("run", found)).lags == (((1.0, 1.0),),) * 20


def test_what_is_missing_is_named():
    found = metrics()
    del found["async/staleness_mean"]
    with pytest.raises(UserError, match="run gone has no metric async/staleness_mean"):
        observed(recorded("gone", found))
    found = metrics()
    found["async/staleness/lag_0"] = History(STEPS, np.full(20, 0.5))
    with pytest.raises(UserError, match=r"tokens of step 1 were: .* add up to 0.5"):
        observed(recorded("half", found))
