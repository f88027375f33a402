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
        (lambda v: v.update(format=2), "format 2, and 1 is what is read"),
        (lambda v: v.update(plans={}), "plans is empty"),
        (lambda v: v.update(parts={}), "parts must be settling, erosion, drift, got "),
        (lambda v: v["parts"].pop("drift"), "parts must be settling, erosion, drift, got settling"),
        (lambda v: v.update(reference={}), "goodness and reference must be of the same kinds"),
        (lambda v: v["domain"].update(batch=[9, 1]), "domain.batch is the fewest groups and the"),
        (lambda v: v["learning"].update(reward_start=2.0), "reward_start must be below learning."),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(found, change, says):
    with pytest.raises(UserError) as caught:
        Calibration.from_json(broken(found.to_json(), change), "c.json")
    assert str(caught.value).startswith("c.json: ")
    assert says in str(caught.value)
    assert "write it anew with qrl simulate --calibrate" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *[(f"learning.{name}", -1.0) for name in ("gain", "staleness_scale", "reward_noise")],
        *[(f"learning.{name}", 0.0) for name in ("half", "mismatch_limit", "decay", "divergence")],
        ("learning.staleness_power", 1e6),
        ("learning.staleness_scale", 1e300),
        ("learning.reward_rate", 1.5),
        ("learning.reward_ceiling", 1e300),
        ("settling", -5.0),
        ("erosion", 1e308),
        ("erosion_power", 1e9),
        ("plans.bf16.floor", -1.0),
        ("plans.bf16.sampling_seconds", 0.0),
        ("plans.bf16.update_seconds", -1.0),
        ("plans.nvfp4.tokens", 0.0),
        ("domain.group_size", 0),
        ("domain.steps", 0),
        ("domain.largest_lag", -1.0),
        ("parts.drift.fall", float("nan")),
        ("goodness.reward.rmse", float("inf")),
        ("learning.gain", float("nan")),
    ],
)
def test_an_impossible_number_is_named(found, place, value):
    def change(values):
        *path, last = place.split(".")
        for key in path:
            values = values[key]
        assert last in values
        values[last] = value

    with pytest.raises(UserError) as caught:
        Calibration.from_json(broken(found.to_json(), change), "c.json")
    assert str(caught.value).startswith(f"c.json: {place} ")
    assert "write it anew" in str(caught.value)


def test_the_largest_numbers_that_are_read_do_not_overflow(found):
    """What no fit finds may be absurd; it is never a traceback, nor NaN."""

    def change(values):
        values["learning"].update(staleness_scale=1e9, staleness_power=10.0, mismatch_limit=1e-12)
        values["learning"].update(gain=1e9, feedback=1e9, drift_cost=1e9, reward_rate=1.0)
        values.update(settling=10.0, erosion=1e3, erosion_power=100.0)

    absurd = Calibration.from_json(broken(found.to_json(), change), "c.json")
    made = predict(absurd, "bf16", [[1000.0, 0.0]] * 30)
    assert np.isfinite([*made.mismatch, *made.drift, *made.reward]).all()


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
