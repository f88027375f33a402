"""Constants that made the runs come back, within the intervals that are stated."""

from dataclasses import replace

import numpy as np
import pytest
from calibrations import FLOORS, TRUTH, constant, grid, run

from lightning_qrl.errors import UserError
from lightning_qrl.reports.calibration import calibration_text
from lightning_qrl.simulator.calibrated import calibrate
from lightning_qrl.simulator.calibrated.calibrate import prepare
from lightning_qrl.simulator.calibrated.fit import fit
from lightning_qrl.simulator.calibrated.structure import Structure

DRIFTING = replace(
    TRUTH, staleness_scale=0.011, staleness_power=1.5, gain=6.0, feedback=0.65, decay=0.12,
    drift_cost=0.12,
)  # fmt: skip


def test_without_noise_the_constants_come_back():
    runs = grid(seeds=(0,), lags=(0, 1, 2, 4, 6), learning=DRIFTING, noise=0.0)
    prepared = prepare(runs)
    found = fit(prepared, Structure(drift=True), start=fit(prepared, Structure()))
    for name in Structure(drift=True).constants:
        true = getattr(DRIFTING, name)
        assert getattr(found.learning, name) == pytest.approx(true, rel=1e-3), name
    assert found.floors(prepared.plans) == pytest.approx(FLOORS, rel=1e-3)


@pytest.fixture(scope="module")
def quiet():
    return calibrate(grid())


@pytest.fixture(scope="module")
def drifting():
    return calibrate(grid(learning=DRIFTING))


def covered(found, learning):
    """Whether each interval holds the truth, of constants that the truth has."""
    true = {**vars(learning), **{f"floor/{plan}": value for plan, value in FLOORS.items()}}
    return {
        name: low <= true[name] <= high
        for name, ends in found.intervals.items()
        for low, high in [
            (-np.inf if ends[0] is None else ends[0], np.inf if ends[1] is None else ends[1])
        ]
        if name in true
    }


def test_runs_without_drift_have_none_and_say_so(quiet):
    assert not any(part.taken for part in quiet.parts.values())
    assert quiet.learning.gain == quiet.learning.feedback == quiet.learning.drift_cost == 0
    assert quiet.notes[0].startswith("drift: not identified")
    assert quiet.notes[-1].startswith("seeds: 16 runs share 2, and runs of one seed see the same")
    assert quiet.notes[-1].endswith("; the intervals rest on so few as 2")
    assert "no limit of stability" in quiet.notes[0]
    assert sum(covered(quiet, TRUTH).values()) >= 6  # of 8, each right 95 times in 100
    assert quiet.goodness["mismatch"].r2_of_curve > 0.85


def test_runs_that_drift_have_it(drifting):
    assert [name for name, part in drifting.parts.items() if part.taken] == ["drift"]
    low, high = drifting.intervals["gain"]
    assert low < DRIFTING.gain < high
    assert not any("not identified" in note for note in drifting.notes)
    assert drifting.goodness["held_out"].r2_of_curve > 0.9


def test_what_is_not_fitted_is_the_posts_and_times_are_medians(quiet):
    assert (quiet.learning.half, quiet.learning.floor_share) == (0.02, 0.5)
    plan = quiet.plans["nvfp4"]
    assert (plan.sampling_seconds, plan.update_seconds) == (0.5, 0.25)
    assert plan.seconds_per_token == 0.005
    measured = np.mean([r.mismatch for r in grid() if r.recipe == "nvfp4" and r.synchronous])
    assert plan.measured_floor == pytest.approx(measured)
    assert (quiet.domain.batch, quiet.domain.group_size, plan.tokens) == ((8, 8), 4, 100)
    assert (quiet.domain.runs, quiet.domain.settings, quiet.domain.largest_lag) == (16, 8, 6)


def test_a_clock_that_did_not_run_says_nothing():
    stopped = [replace(run, sampling_seconds=(0.0,) * len(run.lags)) for run in grid(steps=12)]
    plan = calibrate(stopped).plans["bf16"]
    assert (plan.sampling_seconds, plan.seconds_per_token, plan.update_seconds) == (
        None,
        None,
        0.25,
    )


def test_a_wrong_structure_has_a_bad_error_on_what_was_left_out(quiet):
    """Mismatch that depends on a setting's name, which no model knows."""
    rng = np.random.default_rng(1)
    runs = []
    for plan in FLOORS:
        for lag in (0, 1, 3, 6):
            factor = float(np.exp(1.5 * rng.standard_normal()))
            lags = constant(lag, 30)
            runs.append(run(plan, lags, 0, mismatch_factor=factor))
    found = calibrate(runs)
    assert found.goodness["mismatch"].r2_of_curve < 0.5
    assert quiet.goodness["mismatch"].r2_of_curve > 0.85


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """20 sets of runs without drift: 8 constants each, nominal 95%; parts, each taken at 5%."""
    found = [calibrate(grid(seeds=(2 * first, 2 * first + 1))) for first in range(20)]
    hits = [hit for one in found for hit in covered(one, TRUTH).values()]
    taken = sum(part.taken for one in found for part in one.parts.values())
    assert np.mean(hits) > 0.85
    assert taken <= 9  # of 60


def test_too_few_runs_say_how_many_are_needed():
    with pytest.raises(UserError, match=r"at least 6 runs, and has 4; make more, such as qrl fit"):
        calibrate(grid(seeds=(0,), lags=(0, 2)))
    with pytest.raises(UserError, match="at least 3 different lags, and has 0, 2; make more"):
        calibrate(grid(lags=(0, 2)))
    runs = [r for r in grid() if r.recipe != "bf16" or not r.synchronous]
    with pytest.raises(UserError, match="a synchronous run of each plan, and has none of bf16"):
        calibrate(runs)


def test_runs_that_differ_in_more_are_refused_with_the_key():
    runs = grid()
    runs[3] = replace(runs[3], alike={"optimizer.lr": "0.001"})
    with pytest.raises(UserError, match=r"differ in optimizer.lr \(not set, 0.001\)"):
        calibrate(runs)


def test_plans_of_one_name_are_told_apart():
    runs = [replace(r, plan_text=str(r.seed)) for r in grid() if r.recipe == "bf16"]
    plans = prepare(runs).plans
    assert len(set(plans)) == 2
    assert all(plan.startswith("bf16-") for plan in plans)


def test_a_run_that_cannot_be_used_is_refused():
    one = grid()[0]
    with pytest.raises(UserError, match="has 5 steps, and a calibration needs at least 10"):
        replace(one, mismatch=one.mismatch[:5])
    with pytest.raises(UserError, match="not finite"):
        replace(one, reward=(float("nan"), *one.reward[1:]))
    with pytest.raises(UserError, match="lags of 30 steps, mismatch of 30 and rewards of 29"):
        replace(one, reward=one.reward[1:])
    with pytest.raises(UserError, match=r"has a mismatch of -0.001, and .* never negative"):
        replace(one, mismatch=(-1e-3, *one.mismatch[1:]))


@pytest.mark.parametrize("what", ["mismatch", "reward"])
def test_runs_that_are_one_number_are_refused(what):
    runs = [replace(r, **{what: (0.25,) * 30}) for r in grid(seeds=(0,))]
    with pytest.raises(UserError, match=f"the {what} of all runs is 0.25 at every step"):
        calibrate(runs)


def test_the_text_says_which_ends_were_not_found_and_leaves_out_no_rival(quiet):
    ends = {"mismatch_limit": (31.5, None), "reward_rate": (None, 0.5), "reward_start": (0.0, None)}
    text = calibration_text(replace(quiet, intervals={**quiet.intervals, **ends}))
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert "> 31.5" in rows["mismatch_limit"]
    assert "< 0.5" in rows["reward_rate"]
    assert "not found" in rows["reward_start"]
    settings, lags = (line for line in text.splitlines() if "left out  " in line and "R²" in line)
    assert "R² by the same lag" in settings
    assert "same lag" not in lags
