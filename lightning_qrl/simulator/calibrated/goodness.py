"""How well the model does on runs that it did not see: one setting is left out at a time.

All runs of a setting (they differ in their seed alone) are left out together, the constants are
found from the others, and the model predicts those that were left out from their plan and their
lags. One rival predicts the mean of the others, whatever the step; a sharper one their mean at that
step, whatever the plan and the lag; the sharpest their mean at that step among those of the same
lag, which are of other plans.

    R² = 1 - (squared error of the model) / (squared error of the rival)

is below 0 where the model is worse than that. The last rival knows the runs of the same seed too,
with the noise that they share, and is no rival where all settings of a lag are left out: that asks
what only a model can tell. Lag 0 is never left out like this, as no plan has a floor without it.

Whether a part of the model earns its place is judged by the same errors, each kind over its noise:
by how much they fall with the part, setting by setting, against the standard error of that (a
one-sided t test at 5%, for which settings are independent: seeds that they share make it too sure).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_qrl.simulator.calibrated.calibration import Goodness, Guessed, Part
from lightning_qrl.simulator.calibrated.fit import Fit, fit
from lightning_qrl.simulator.calibrated.observed import ObservedRun
from lightning_qrl.simulator.calibrated.runs import KINDS, Runs, apart
from lightning_qrl.simulator.calibrated.trajectories import Floats

TRIES = 20  # of a search that begins with the fit to all runs
SURE = 0.95  # that a fall is no chance, by Student's t, one-sided
LATE = 10  # steps that "the end" means
EXACT = 1e-18  # a squared error that is none


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


@dataclass
class _Errors:
    """Of one kind of numbers: the model's and its rivals'."""

    own: list[Floats] = field(default_factory=list)
    mean: list[Floats] = field(default_factory=list)
    curve: list[Floats] = field(default_factory=list)
    own_with_lag: list[Floats] = field(default_factory=list)  # where the last rival is
    lag: list[Floats] = field(default_factory=list)


def leave_out(runs: Runs, whole: Fit, noise: Sequence[float]) -> LeftOut:
    """Predict each setting from the others.

    Args:
        runs: of at least two settings.
        whole: a fit to all of them, which tells the structure; searches begin with it.
        noise: by kind; what `LeftOut.loss` counts in.
    """
    errors = [_Errors() for _ in KINDS]
    loss, guessed = {}, {}
    for setting in dict.fromkeys(run.setting for run in runs.observed):
        out = [r for r, run in enumerate(runs.observed) if run.setting == setting]
        theirs, said = _predicted(runs, whole, out, errors)
        squares = [a**2 / n**2 for a, n in zip(apart(said, theirs.measured()), noise, strict=True)]
        loss[setting] = float(np.mean([part.mean() for part in squares if part.size]))
        guessed[setting] = _guessed(theirs, said)
    return LeftOut(_by_kind(errors), guessed, loss)


def leave_out_lags(runs: Runs, whole: Fit) -> Mapping[str, Goodness]:
    """Predict all settings of a lag from those of the others, by kind; each lag but 0.

    Args:
        runs: of several lags.
        whole: a fit to all of them, as above.
    """
    errors = [_Errors() for _ in KINDS]
    lags = {_lag(run) for run in runs.observed if not run.synchronous}
    for lag in sorted(lags) if len(lags) > 1 else ():
        out = [r for r, run in enumerate(runs.observed)
               if _lag(run) == lag and not run.synchronous]  # fmt: skip
        _predicted(runs, whole, out, errors)
    return _by_kind(errors)


def _predicted(
    runs: Runs, whole: Fit, out: Sequence[int], errors: Sequence[_Errors]
) -> tuple[Runs, tuple[Floats, ...]]:
    """Runs that are left out, and what is said of them; its errors go to ``errors``."""
    theirs, rest = runs.only(out), runs.only([r for r in range(len(runs.observed)) if r not in out])
    said = fit(rest, whole.structure, start=whole, tries=TRIES).predict(theirs)
    lags = {_lag(run) for run in theirs.observed}
    alike = rest.only([r for r, run in enumerate(rest.observed) if _lag(run) in lags])
    measured = theirs.measured()
    for kind, others in enumerate(rest.measured()):
        if not others.size:
            continue
        found, steps = errors[kind], theirs.steps()[kind]
        found.own.append(said[kind] - measured[kind])
        found.mean.append(measured[kind] - others.mean())
        found.curve.append(measured[kind] - _curve(rest.steps()[kind], others)(steps))
        of_lag = alike.measured()[kind]
        if of_lag.size:
            found.own_with_lag.append(found.own[-1])
            found.lag.append(measured[kind] - _curve(alike.steps()[kind], of_lag)(steps))
    return theirs, said


def _lag(run: ObservedRun) -> int:
    """To the next whole version: lags of runs with a clock are never quite the same."""
    return round(run.usual_lag)


def _curve(steps: Floats, values: Floats) -> Callable[[Floats], Floats]:
    """Means by step; between steps that are there, on the line."""
    there, at = np.unique(steps, return_inverse=True)
    means = np.bincount(at, values) / np.bincount(at)
    return lambda asked: np.interp(asked, there, means)


def _by_kind(errors: Sequence[_Errors]) -> Mapping[str, Goodness]:
    return {
        name: _goodness(found)
        for name, found in zip(KINDS, errors, strict=True)
        if any(part.size for part in found.own)
    }


def _goodness(errors: _Errors) -> Goodness:
    own, mean, curve = map(_square, (errors.own, errors.mean, errors.curve))
    has_lag = any(part.size for part in errors.lag)
    lag = _square(errors.lag) if has_lag else None
    return Goodness(
        rmse=math.sqrt(own),
        rmse_of_mean=math.sqrt(mean),
        rmse_of_curve=math.sqrt(curve),
        rmse_of_lag=None if lag is None else math.sqrt(lag),
        r2=_r2(own, mean),
        r2_of_curve=_r2(own, curve),
        r2_of_lag=None if lag is None else _r2(_square(errors.own_with_lag), lag),
    )


def _square(parts: Sequence[Floats]) -> float:
    return float(np.mean(np.concatenate(parts) ** 2))


def _r2(own: float, rival: float) -> float | None:
    """None where the rival has no error."""
    return 1 - own / rival if rival > EXACT else None


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
