"""Runs that collapsed, up to where they did.

A run has diverged where its reward, as a mean over `WINDOW` steps, falls below half of the best
that it was and stays there to the end. What comes after is not what the model is fitted to: there
it has drift and a collapse, of which a run shows one moment alone, while a mismatch that explodes
would decide all other constants. So the run ends at the last step at which that mean was within a
tenth of its best. A reward that is never above 0 cannot be judged like this, and is left as it is.

S steps.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.calibrated.observed import LEAST_STEPS, ObservedRun

WINDOW = 5  # steps that count as one
COLLAPSED, SOUND = 0.5, 0.9  # of the best reward


def sound_steps(reward: Sequence[float]) -> int:
    """How many steps a run has before it diverges; all, where it does not.

    Args:
        reward: [S] of the steps.
    """
    mean = np.convolve(reward, np.ones(WINDOW) / WINDOW, "valid")  # of a step and those before
    best = mean.max()
    if best <= 0 or mean[-1] >= COLLAPSED * best:
        return len(reward)
    return int(np.flatnonzero(mean >= SOUND * best)[-1]) + WINDOW


def before_divergence(run: ObservedRun) -> ObservedRun:
    """The run up to where it diverges.

    Raises:
        UserError: too little is left.
    """
    steps = sound_steps(run.reward)
    if steps == len(run.reward):
        return run
    if steps < LEAST_STEPS:
        raise UserError(
            f"run {run.name} diverges after step {steps}, and a calibration needs at least "
            f"{LEAST_STEPS} steps of each before that; leave it out"
        )
    return replace(
        run, lags=run.lags[:steps], mismatch=run.mismatch[:steps], reward=run.reward[:steps],
        held_out=tuple((step, reward) for step, reward in run.held_out if step <= steps),
    )  # fmt: skip
