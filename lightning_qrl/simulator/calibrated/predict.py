"""What a calibration says of a run that has not been made: mismatch, drift, reward, step by step.

Beyond what the calibration's runs were, every prediction says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.calibrated.calibration import Calibration
from lightning_qrl.simulator.calibrated.trajectories import NEW, Ages, as_arrays, trajectories
from lightning_qrl.simulator.dynamics import collapsed_reward, divergence_step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of a run of S steps.

    Attributes:
        mismatch: [S] mean |Δlogprob| as it would be measured.
        drift: [S] after each step; 0 where the calibration has none.
        reward: [S] of the weights after each step.
        diverged_at_step: as in `Trace`.
        notes: why not to trust it.
    """

    mismatch: tuple[float, ...]
    drift: tuple[float, ...]
    reward: tuple[float, ...]
    diverged_at_step: int | None
    notes: tuple[str, ...]


def predict(
    calibration: Calibration,
    plan: str,
    ages: Sequence[Sequence[float]],
    batch: int | None = None,
) -> Prediction:
    """Run the model.

    Args:
        calibration: the constants.
        plan: one of its plans.
        ages: [S] of each step, the versions that each of its rollouts is behind, as in `Step`.
        batch: groups of a step, if they shall be held against those of the calibration's runs.

    Raises:
        UserError: the plan is unknown, there is no step, a step has no rollout, or an age is
            negative.
    """
    floor = calibration.plan(plan).floor
    if not ages or not all(ages) or min(map(min, ages)) < 0:
        raise UserError("a prediction needs steps, each with the ages of its rollouts, from 0 up")
    learning = calibration.learning
    lags = [tuple((float(age), 1 / len(step)) for age in step) for step in ages]
    new = {name: getattr(calibration, name) for name in NEW}
    made = trajectories(
        as_arrays(learning, new),
        np.array([[floor]]),
        Ages.of([lags]),
    )
    drift, reward = made.drift[0, :, 0].tolist(), made.reward[0, :, 0].tolist()
    diverged = divergence_step(drift, learning)
    for step in range(len(drift) if diverged is None else diverged, len(drift)):
        reward[step + 1] = collapsed_reward(reward[step], learning)
    return Prediction(
        mismatch=tuple(made.mismatch[0, :, 0].tolist()),
        drift=tuple(drift),
        reward=tuple(reward[1:]),
        diverged_at_step=diverged,
        notes=tuple(_notes(calibration, ages, batch)),
    )


def _notes(
    calibration: Calibration, ages: Sequence[Sequence[float]], batch: int | None
) -> list[str]:
    domain, notes = calibration.domain, []
    oldest = max(map(max, ages))
    if oldest > domain.largest_lag:
        notes.append(
            f"staleness {oldest:g} is beyond the 0 to {domain.largest_lag:g} that the runs show"
        )
    if len(ages) > domain.steps:
        notes.append(f"{len(ages)} steps are more than the {domain.steps} that the runs show")
    if batch is not None and not domain.batch[0] <= batch <= domain.batch[1]:
        least, most = domain.batch
        shown = f"{least}" if least == most else f"{least} to {most}"
        notes.append(f"a batch of {batch} groups is not one of the {shown} that the runs show")
    if not calibration.parts["drift"].taken:
        notes.append("the runs do not identify drift: nothing is said of stability")
    return notes
