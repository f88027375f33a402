"""A run counts up to where it collapses, and no longer."""

from dataclasses import replace

import numpy as np
import pytest
from calibrations import grid

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.calibrated import calibrate
from lightning_qrl.simulator.calibrated.calibrate import prepare
from lightning_qrl.simulator.calibrated.divergence import before_divergence, sound_steps
from lightning_qrl.simulator.calibrated.fit import fit
from lightning_qrl.simulator.calibrated.structure import Structure


def collapsed(run, step):
    """The run, with what a divergence does to it from a step on."""
    late = len(run.reward) - step
    return replace(
        run,
        reward=(*run.reward[:step], *[0.02] * late),
        mismatch=(*run.mismatch[:step], *np.linspace(1, 5, late).tolist()),
    )


def test_a_run_ends_where_its_reward_falls_and_stays():
    run = grid(seeds=(0,), steps=40)[0]
    assert before_divergence(run) is run
    cut = before_divergence(collapsed(run, 25))
    assert cut.reward == run.reward[:25]
    assert cut.mismatch == run.mismatch[:25]
    assert cut.lags == run.lags[:25]
    assert [step for step, _ in cut.held_out] == [0, 10, 20]


@pytest.mark.parametrize(
    "reward",
    [
        [0.3, 0.5, 0.7, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.8, 0.8, 0.8, 0.8, 0.8],  # it comes back
        np.linspace(0.9, 0.5, 20),  # above half of its best
        np.linspace(-0.5, -2, 20),  # never above 0
        [0.0] * 20,
    ],
)
def test_what_does_not_collapse_is_whole(reward):
    assert sound_steps(reward) == len(reward)


def test_a_run_that_collapses_at_once_is_refused():
    with pytest.raises(UserError, match=r"run bf16-.* diverges after step 7, and a calibration"):
        before_divergence(collapsed(grid(seeds=(0,))[0], 7))


def test_a_diverged_run_does_not_spoil_the_others():
    runs = grid(seeds=(0,), steps=40)
    runs[-1] = collapsed(runs[-1], 25)
    found, spoilt = calibrate(runs), fit(prepare(runs), Structure())
    assert found.learning.staleness_scale == pytest.approx(0.02, rel=0.2)
    assert spoilt.learning.staleness_scale != pytest.approx(0.02, rel=0.5)
    assert found.notes[-1] == f"diverged, and left out from there on: {runs[-1].name} after step 25"
