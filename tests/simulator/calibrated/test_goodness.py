"""Rivals, against their definitions in plain Python."""

import numpy as np
import pytest
from calibrations import grid

from lightning_qrl.simulator.calibrated.calibrate import prepare
from lightning_qrl.simulator.calibrated.fit import fit
from lightning_qrl.simulator.calibrated.goodness import leave_out, leave_out_lags
from lightning_qrl.simulator.calibrated.structure import Structure

LAGS = (0, 1, 3, 6)


@pytest.fixture(scope="module")
def fitted():
    runs = prepare(grid(seeds=(0,), lags=LAGS))
    return runs, fit(runs, Structure())


def test_the_rival_of_the_same_lag_is_the_other_plan_at_that_lag_and_step(fitted):
    runs, found = fitted
    bf16, nvfp4 = (
        np.array([run.reward for run in runs.observed if run.recipe == plan])
        for plan in ("bf16", "nvfp4")
    )
    made = leave_out(runs, found, found.noise).goodness["reward"]
    assert made.rmse_of_lag == pytest.approx(np.sqrt(np.mean((bf16 - nvfp4) ** 2)))
    assert made.r2_of_lag == pytest.approx(1 - (made.rmse / made.rmse_of_lag) ** 2)


def test_a_single_plan_has_no_rival_of_the_same_lag():
    runs = prepare([run for run in grid(seeds=(0,)) if run.recipe == "bf16"])
    found = fit(runs, Structure())
    for made in leave_out(runs, found, found.noise).goodness.values():
        assert made.rmse_of_lag is None
        assert made.r2_of_lag is None
        assert made.r2 is not None


def test_a_lag_that_was_left_out_is_predicted_by_what_the_others_say(fitted):
    """The mean at a step of the others is of other lags, and far off in mismatch."""
    runs, found = fitted
    made = leave_out_lags(runs, found)["mismatch"]
    mismatch = {
        lag: np.array([run.mismatch for run in runs.observed if run.usual_lag == lag])
        for lag in LAGS
    }
    errors = [
        mismatch[lag] - np.concatenate([mismatch[other] for other in LAGS if other != lag]).mean(0)
        for lag in LAGS[1:]
    ]
    assert made.rmse_of_curve == pytest.approx(np.sqrt(np.mean(np.square(errors))))
    assert made.rmse_of_lag is None
    assert made.r2_of_curve > 0.8


def test_a_rival_without_error_has_no_r2(fitted):
    runs, found = fitted
    same = prepare([type(run)(**{**vars(run), "reward": (0.5,) * 30}) for run in runs.observed])
    made = leave_out(same, found, found.noise).goodness["reward"]
    assert made.r2 is made.r2_of_curve is made.r2_of_lag is None
    assert made.rmse_of_mean == 0
