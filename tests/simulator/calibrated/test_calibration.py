"""A calibration as a file, and what it predicts."""

import json

import numpy as np
import pytest
from calibrations import FLOORS, TRUTH, constant, grid, run

from lightning_qrl.errors import UserError
from lightning_qrl.reports.calibration import calibration_text
from lightning_qrl.simulator.calibrated import Calibration, calibrate, predict


@pytest.fixture(scope="module")
def found():
    return calibrate(grid(seeds=(0,), lags=(0, 1, 3, 6), steps=20))


def test_json_gives_back_the_same_calibration(found):
    assert Calibration.from_json(found.to_json()) == found


def broken(text, change):
    values = json.loads(text)
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.pop("plans"), "plans: Field required"),
        (lambda v: v["learning"].pop("half"), "keys are missing or unknown"),
        (lambda v: v.update(more=1), "keys are missing or unknown"),
        (lambda v: v["learning"].update(half="x"), "learning.half: Input should be a valid number"),
        (lambda v: v["learning"].update(half=0.0), "learning.half is above 0"),
        (lambda v: v["learning"].update(gain=-1.0), "learning.gain is a number of at least 0"),
        (lambda v: v["plans"]["bf16"].update(floor=-1.0), "plans.bf16.floor is a number"),
        (lambda v: v.update(format=2), "format 2, and 1 is what is read"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(found, change, says):
    with pytest.raises(UserError) as caught:
        Calibration.from_json(broken(found.to_json(), change), "c.json")
    assert str(caught.value).startswith("c.json: ")
    assert says in str(caught.value)
    assert "write it anew with qrl simulate --calibrate" in str(caught.value)


def test_a_file_that_is_no_json_is_refused():
    with pytest.raises(UserError, match=r"^c.json: the file: Invalid JSON"):
        Calibration.from_json("half: 3", "c.json")


def test_a_prediction_is_near_to_a_run_that_was_not_seen(found):
    lags = constant(4, 20)
    seen = run("nvfp4", lags, seed=9, noise=0.0)
    made = predict(found, "nvfp4", [[age for age, _ in own] for own in lags], batch=8)
    np.testing.assert_allclose(made.mismatch, seen.mismatch, rtol=0.15)
    last = dict(seen.held_out)[20]
    assert made.reward[-1] == pytest.approx(last, abs=0.02)
    assert made.diverged_at_step is None
    assert made.notes == ("the runs do not identify drift: nothing is said of stability",)


def test_beyond_its_runs_a_prediction_says_so(found):
    made = predict(found, "bf16", [[32.0, 0.0]] * 25, batch=4)
    assert made.notes[:3] == (
        "staleness 32 is beyond the 0 to 6 that the runs show",
        "25 steps are more than the 20 that the runs show",
        "a batch of 4 groups is not one of the 8 that the runs show",
    )


def test_an_unknown_plan_and_impossible_ages_are_refused(found):
    with pytest.raises(UserError, match="has no plan fp8, only bf16, nvfp4"):
        predict(found, "fp8", [[0.0]])
    for ages in ([], [[]], [[-1.0]]):
        with pytest.raises(UserError, match="needs steps"):
            predict(found, "bf16", ages)


def test_a_run_that_diverges_collapses(found):
    """With the post's drift, and more staleness than it bears."""
    learning = type(TRUTH)(reward_start=0.35)
    post = Calibration(**{**vars(found), "learning": learning})
    made = predict(post, "nvfp4", [[4.0]] * 60)
    assert made.diverged_at_step is not None
    assert made.drift[-1] == learning.drift_limit
    assert made.reward[-1] == learning.reward_least


def test_the_text_has_every_plan_and_what_is_not_known(found):
    text = calibration_text(found)
    assert text.startswith("8 runs of 8 settings, up to 20 steps of 8 groups, up to 6 versions")
    for word in (*FLOORS, "staleness_power", "note: drift: not identified", "R² by the curve"):
        assert word in text
    assert text.endswith("\n")
