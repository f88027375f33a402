"""Least squares: the constants with which the model's trajectories are nearest to the runs'.

The square root of each step's mismatch counts (its noise grows with its size, and it may be 0),
each step's reward, and held-out rewards. Each kind is divided by its own noise, which earlier fits
tell; all runs count the same.

W numbers that count, P constants that are fitted, C sets of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from lightning_qrl.simulator.calibrated.runs import Runs, apart
from lightning_qrl.simulator.calibrated.structure import Structure, box, constants, guess
from lightning_qrl.simulator.calibrated.trajectories import (
    NEW,
    Floats,
    Trajectories,
    trajectories,
)
from lightning_qrl.simulator.constants import Learning

STEP = 1e-5  # of a derivative
TRIES = 200
ROUNDS = 3  # of weighing the kinds anew


@dataclass(frozen=True, eq=False)
class Fit:
    """Constants that were found.

    Attributes:
        structure: of the model.
        values_P: what was searched for; `learning` and `floors` read it.
        noise: root mean square of what is left, by kind.
    """

    structure: Structure
    values_P: Floats
    noise: tuple[float, ...]

    @property
    def learning(self) -> Learning:
        """All constants; without drift its gain, feedback and cost are 0."""
        found = {
            name: float(v[0]) for name, v in constants(self.values_P[None], self.structure).items()
        }
        return Learning(**{item.name: found[item.name] for item in fields(Learning)})

    @property
    def new(self) -> dict[str, float]:
        """What `Learning` has not; 0 where the structure has it not either."""
        found = constants(self.values_P[None], self.structure)
        return {name: float(found[name][0]) for name in NEW}

    def floors(self, plans: Sequence[str]) -> dict[str, float]:
        """By plan."""
        return dict(zip(plans, self.values_P[len(self.structure.constants) :].tolist(),
                        strict=True))  # fmt: skip

    def predict(self, runs: Runs) -> tuple[Floats, ...]:
        """What the model says of runs, by kind, [W] each."""
        made = _run_model(self.values_P[None], self.structure, runs)
        return tuple(values[0] for values in runs.predicted(made))


def _run_model(values_CP: Floats, structure: Structure, runs: Runs) -> Trajectories:
    floor_CF = values_CP[:, len(structure.constants) :]
    return trajectories(constants(values_CP, structure), floor_CF[:, list(runs.plan_R)], runs.ages)


def fit(runs: Runs, structure: Structure, start: Fit | None = None, tries: int = TRIES) -> Fit:
    """Find the constants.

    Args:
        runs: at least one synchronous run of each plan.
        structure: of the model.
        start: a fit to runs of the same plans, to begin with; it may have fewer parts.
        tries: that the search may make, at most.
    """
    guess_P, noise = guess(runs, structure), _spread(runs)
    if start is not None:
        guess_P, noise = _carried(start, structure, guess_P), start.noise
        if start.structure == structure:  # the errors of which are compared
            values_P = _search(runs, structure, guess_P, noise, tries)
            return Fit(structure, values_P, noise)
    for _ in range(ROUNDS):
        guess_P = _search(runs, structure, guess_P, noise, tries)
        noise = _left(guess_P, structure, runs)
    return Fit(structure, guess_P, noise)


def _carried(start: Fit, structure: Structure, guess_P: Floats) -> Floats:
    """The constants of a fit, and a guess for those that it has not."""
    names = start.structure.constants
    known = dict(zip(names, start.values_P, strict=False))
    own = [known.get(name, guess) for name, guess in zip(structure.constants, guess_P,
                                                         strict=False)]  # fmt: skip
    return np.array([*own, *start.values_P[len(names) :]])


def _search(
    runs: Runs,
    structure: Structure,
    guess_P: Floats,
    noise: Sequence[float],
    tries: int,
) -> Floats:
    from scipy.optimize import least_squares  # not needed to read a calibration

    low_P, high_P = box(runs, structure)
    inside_P = np.clip(guess_P, low_P, high_P)
    found = least_squares(
        lambda values_P: _residuals(values_P[None], structure, runs, noise)[0],
        inside_P,
        jac=lambda values_P: _slopes(values_P, structure, runs, noise)[1],
        bounds=(low_P, high_P), x_scale=np.maximum(np.abs(inside_P), 0.05), xtol=1e-6, ftol=1e-6,
        max_nfev=tries,
    )  # fmt: skip
    values_P: Floats = found.x
    return values_P


def _residuals(
    values_CP: Floats, structure: Structure, runs: Runs, noise: Sequence[float]
) -> Floats:
    """Model less runs over the noise, [C, W]."""
    parts = _apart(values_CP, structure, runs)
    return np.concatenate([part / n for part, n in zip(parts, noise, strict=True)], axis=1)


def _slopes(
    values_P: Floats, structure: Structure, runs: Runs, noise: Sequence[float]
) -> tuple[Floats, Floats]:
    """Residuals [W], and their derivatives [W, P], all in one run of the model."""
    width_P = STEP * np.maximum(np.abs(values_P), 1e-2)
    width_P = np.where(values_P + width_P > box(runs, structure)[1], -width_P, width_P)
    moved_CP = np.vstack([values_P, values_P + np.diag(width_P)])
    found_CW = _residuals(moved_CP, structure, runs, noise)
    return found_CW[0], ((found_CW[1:] - found_CW[0]) / width_P[:, None]).T


def slopes(found: Fit, runs: Runs) -> tuple[Floats, Floats]:
    """Residuals over the noise at a fit, [W], and their derivatives, [W, P]."""
    return _slopes(found.values_P, found.structure, runs, found.noise)


def _apart(values_CP: Floats, structure: Structure, runs: Runs) -> list[Floats]:
    return apart(runs.predicted(_run_model(values_CP, structure, runs)), runs.measured())


def _left(values_P: Floats, structure: Structure, runs: Runs) -> tuple[float, ...]:
    parts = _apart(values_P[None], structure, runs)
    return tuple(float(np.sqrt(np.mean(p**2))) or 1.0 if p.size else 1.0 for p in parts)


def _spread(runs: Runs) -> tuple[float, ...]:
    mismatch, reward, held_out = runs.measured()
    return tuple(float(values.std()) or 1.0 if values.size else 1.0
                 for values in (np.sqrt(mismatch), reward, held_out))  # fmt: skip
