"""How well the model does on runs that it did not see: one setting is left out at a time.

All runs of a setting (they differ in their seed alone) are left out together, the constants are
found from the others, and the model predicts those that were left out from their plan and their
lags. One rival predicts the mean of the others, whatever the step; a sharper one their mean at that
step, whatever the plan and the lag.

    R² = 1 - (squared error of the model) / (squared error of the rival)

is below 0 where the model is worse than that. Whether a part of the model earns its place is judged
by the same errors, each kind over its noise: by how much they fall with the part, setting by
setting, against the standard error of that (a one-sided t test at 5%).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_qrl.simulator.calibrated.calibration import Goodness, Guessed, Part
from lightning_qrl.simulator.calibrated.fit import Fit, fit
from lightning_qrl.simulator.calibrated.runs import KINDS, Runs, apart
from lightning_qrl.simulator.calibrated.trajectories import Floats

TRIES = 20  # of a search that begins with the fit to all runs
SURE = 0.95  # that a fall is no chance, by Student's t, one-sided
LATE = 10  # steps that "the end" means
TINY = 1e-300


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Errors of a structure on what was left out.

    Attributes:
        goodness: by kind.
        guessed: by setting.
        loss: by setting, the mean over kinds of mean squared errors over the noise squared.
    """

    goodness: Mapping[str, Goodness]
    guessed: Mapping[str, Guessed]
    loss: Mapping[str, float]


def leave_out(runs: Runs, whole: Fit, noise: Sequence[float]) -> LeftOut:
    """Predict each setting from the others.

    Args:
        runs: of at least two settings.
        whole: a fit to all of them, which tells the structure; searches begin with it.
        noise: by kind; what `LeftOut.loss` counts in.
    """
    errors: list[list[Floats]] = [[] for _ in KINDS]
    rivals: tuple[list[list[Floats]], ...] = ([[] for _ in KINDS], [[] for _ in KINDS])
    loss, guessed = {}, {}
    for setting in dict.fromkeys(run.setting for run in runs.observed):
        out = [r for r, run in enumerate(runs.observed) if run.setting == setting]
        rest = runs.only([r for r in range(len(runs.observed)) if r not in out])
        theirs, found = runs.only(out), fit(rest, whole.structure, start=whole, tries=TRIES)
        said, measured = found.predict(theirs), theirs.measured()
        for kind, others in enumerate(rest.measured()):
            errors[kind].append(said[kind] - measured[kind])
            if others.size:
                rivals[0][kind].append(measured[kind] - others.mean())
                curve = _curve(rest.steps()[kind], others)
                rivals[1][kind].append(measured[kind] - curve(theirs.steps()[kind]))
        squares = [a**2 / n**2 for a, n in zip(apart(said, measured), noise, strict=True)]
        loss[setting] = float(np.mean([part.mean() for part in squares if part.size]))
        guessed[setting] = _guessed(theirs, said)
    goodness = {
        name: _goodness(errors[kind], rivals[0][kind], rivals[1][kind])
        for kind, name in enumerate(KINDS)
        if any(part.size for part in rivals[0][kind])
    }
    return LeftOut(goodness, guessed, loss)


def _curve(steps: Floats, values: Floats) -> Callable[[Floats], Floats]:
    """Means by step; between steps that are there, on the line."""
    there, at = np.unique(steps, return_inverse=True)
    means = np.bincount(at, values) / np.bincount(at)
    return lambda asked: np.interp(asked, there, means)


def _goodness(*errors: Sequence[Floats]) -> Goodness:
    """Of the model, the mean and the curve."""
    own, mean, curve = (float(np.mean(np.concatenate(parts) ** 2)) for parts in errors)
    return Goodness(
        rmse=math.sqrt(own),
        rmse_of_mean=math.sqrt(mean),
        rmse_of_curve=math.sqrt(curve),
        r2=1 - own / max(mean, TINY),
        r2_of_curve=1 - own / max(curve, TINY),
    )


def _guessed(runs: Runs, said: Sequence[Floats]) -> Guessed:
    one = runs.observed[0]
    sizes = np.cumsum([len(run.reward) for run in runs.observed])[:-1]
    ends = [part[-LATE:].mean() for part in np.split(said[1], sizes)]
    return Guessed(
        plan=runs.plans[runs.plan_R[0]],
        lag=round(one.usual_lag, 2),
        runs=len(runs.observed),
        mismatch=float(np.concatenate([run.mismatch for run in runs.observed]).mean()),
        mismatch_predicted=float(said[0].mean()),
        reward=float(np.mean([np.mean(run.reward[-LATE:]) for run in runs.observed])),
        reward_predicted=float(np.mean(ends)),
    )


def judged(simple: LeftOut, more: LeftOut) -> Part:
    """What a part of the model is worth, from the errors without it and with it."""
    from scipy.special import stdtrit

    whole = float(np.mean(list(simple.loss.values())))
    falls = np.array([simple.loss[s] - more.loss[s] for s in simple.loss]) / whole
    fall, error = float(falls.mean()), float(falls.std(ddof=1) / math.sqrt(falls.size))
    return Part(taken=bool(fall > stdtrit(falls.size - 1, SURE) * error), fall=fall, error=error)
