"""Least squares for a sigmoid in log compute, for many weighted resamples of one data set at once.

    y(C) = floor + (top - floor) f(C),    f(C) = 1 / (1 + (C_mid / C)^B)

which is a logistic function of u = log C. Given C_mid and B the curve is linear in its two levels,
so that these have a closed form and the search has two dimensions (variable projection; Golub and
Pereyra 1973). With a known floor the form is ScaleRL's (arXiv 2510.13786),

    top = floor + sum w f (y - floor) / sum w f^2

and with a free one both sums are taken about weighted means. Each resample starts at the best point
of a grid over (log C_mid, log B), which matrix products find for all resamples together, and is
polished by Levenberg-Marquardt.

The search stays in a box: C_mid within a factor `REACH` of the data, B within `STEEPNESS`. An
answer on its edge is no answer: every C_mid, or B, beyond it would do about as well.

R resamples, S points, G points of the grid; 2 is (log C_mid, log B).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Floats = NDArray[np.float64]

REACH = 100.0  # how far outside the data C_mid may lie, as a factor
STEEPNESS = (0.05, 20.0)
GRID = (64, 28)  # points over log C_mid and over log B
STEPS = 200  # of Levenberg-Marquardt at most; 10 are usual
TOLERANCE = 1e-10  # a step in log C_mid and log B that ends the search
TINY = 1e-200  # keeps a zero denominator from dividing zero


@dataclass(frozen=True, eq=False, slots=True)
class Sigmoids:
    """A sigmoid for each resample.

    Attributes:
        floor_R: its level at small compute.
        top_R: its level at large compute.
        theta_R2: natural logarithms of C_mid and of B.
    """

    floor_R: Floats
    top_R: Floats
    theta_R2: Floats

    def at(self, compute_S: Floats) -> Floats:
        """The values at some compute, not negative, [R, S]."""
        with np.errstate(divide="ignore"):  # at compute 0, where f is 0
            f_RS = _rise(np.log(compute_S), self.theta_R2)
        return self.floor_R[:, None] + (self.top_R - self.floor_R)[:, None] * f_RS


def box(compute_S: Floats) -> tuple[Floats, Floats]:
    """The lower and the upper corner of the search, [2] each, for data at this compute."""
    low, high = np.log(compute_S.min() / REACH), np.log(compute_S.max() * REACH)
    least, most = np.log(STEEPNESS)
    return np.array([low, least]), np.array([high, most])


def fit_sigmoids(
    compute_S: Floats, y_RS: Floats, weights_RS: Floats, floor_R: Floats | None
) -> Sigmoids:
    """The sigmoid of least squares for each resample.

    Args:
        compute_S: float64 [S], positive.
        y_RS: float64 [R, S], or [1, S] where all resamples share them.
        weights_RS: float64 [R, S] or [1, S]; not negative, with a positive sum in each row.
        floor_R: float64 [R], the known floor; None: it is fitted too.
    """
    y_RS, weights_RS = np.broadcast_arrays(y_RS, weights_RS)
    z_RS = y_RS if floor_R is None else y_RS - floor_R[:, None]
    problem = _Problem(np.log(compute_S), z_RS, weights_RS, free=floor_R is None)
    low_2, high_2 = box(compute_S)
    theta_R2 = _polish(problem, _start(problem, low_2, high_2), low_2, high_2)
    f_RS = _rise(problem.u_S, theta_R2)
    gain_R = problem.gain(problem.centred(f_RS))
    if floor_R is None:
        floor_R = problem.mean(y_RS - gain_R[:, None] * f_RS)
    return Sigmoids(floor_R, floor_R + gain_R, theta_R2)


@dataclass(frozen=True, eq=False, slots=True)
class _Problem:
    """The data of all resamples, with the levels projected out.

    Attributes:
        u_S: natural logarithm of compute.
        z_RS: y above the floor; y itself when that is free.
        w_RS: weights.
        free: whether the floor is fitted.
    """

    u_S: Floats
    z_RS: Floats
    w_RS: Floats
    free: bool

    def rows(self, on: NDArray[np.intp]) -> "_Problem":
        """Some of the resamples."""
        return _Problem(self.u_S, self.z_RS[on], self.w_RS[on], self.free)

    def dot(self, a_RS: Floats, b_RS: Floats) -> Floats:
        total_R: Floats = np.einsum("rs,rs,rs->r", self.w_RS, a_RS, b_RS)
        return total_R

    def mean(self, a_RS: Floats) -> Floats:
        total_R: Floats = np.einsum("rs,rs->r", self.w_RS, a_RS)
        mean_R: Floats = total_R / self.w_RS.sum(axis=1)
        return mean_R

    def centred(self, a_RS: Floats) -> Floats:
        """What a free floor cannot take up."""
        return a_RS - self.mean(a_RS)[:, None] if self.free else a_RS

    def gain(self, f_RS: Floats) -> Floats:
        """The closed form of top - floor, for a centred f."""
        return self.dot(f_RS, self.z_RS) / (self.dot(f_RS, f_RS) + TINY)

    def error(self, f_RS: Floats) -> Floats:
        """What is left of y, for a centred f."""
        return self.centred(self.z_RS) - self.gain(f_RS)[:, None] * f_RS

    def loss(self, theta_R2: Floats) -> Floats:
        error_RS = self.error(self.centred(_rise(self.u_S, theta_R2)))
        return self.dot(error_RS, error_RS)

    def normal_equations(self, theta_R2: Floats) -> tuple[Floats, Floats]:
        """Gauss-Newton's matrix [R, 2, 2] and right side [R, 2] (Kaufman's approximation)."""
        f_RS = _rise(self.u_S, theta_R2)
        by_mid_RS = -np.exp(theta_R2[:, 1:]) * f_RS * (1 - f_RS)
        by_steepness_RS = by_mid_RS * (theta_R2[:, :1] - self.u_S)
        f_RS = self.centred(f_RS)
        gain_R, square_R = self.gain(f_RS), self.dot(f_RS, f_RS) + TINY
        error_RS = self.error(f_RS)
        columns = []
        for slope_RS in (self.centred(by_mid_RS), self.centred(by_steepness_RS)):
            along_R = self.dot(f_RS, slope_RS) / square_R
            columns.append(gain_R[:, None] * (slope_RS - along_R[:, None] * f_RS))
        matrix = [[self.dot(a, b) for b in columns] for a in columns]
        right = [self.dot(a, error_RS) for a in columns]
        return np.moveaxis(np.array(matrix), -1, 0), np.stack(right, axis=-1)


def _start(problem: _Problem, low_2: Floats, high_2: Floats) -> Floats:
    """The best point of the grid for each resample, [R, 2]."""
    mid, steepness = (np.linspace(low_2[i], high_2[i], GRID[i]) for i in range(2))
    theta_G2 = np.stack(np.meshgrid(mid, steepness, indexing="ij"), axis=-1).reshape(-1, 2)
    f_GS = _rise(problem.u_S, theta_G2)
    w_RS = problem.w_RS
    along_RG = (w_RS * problem.centred(problem.z_RS)) @ f_GS.T  # so that f need not be centred
    square_RG = w_RS @ (f_GS**2).T
    all_RG = square_RG
    if problem.free:
        square_RG = square_RG - (w_RS @ f_GS.T) ** 2 / w_RS.sum(axis=1)[:, None]
    # Where f is flat on the points it explains nothing, and the quotient is rounding.
    explained_RG = np.where(square_RG > 1e-9 * all_RG, along_RG**2 / (square_RG + TINY), 0.0)
    best_R2: Floats = theta_G2[explained_RG.argmax(axis=1)]
    return best_R2


def _polish(problem: _Problem, theta_R2: Floats, low_2: Floats, high_2: Floats) -> Floats:
    """Levenberg-Marquardt inside the box, for all resamples together until each has arrived."""
    theta_R2, damping_R = theta_R2.copy(), np.full(len(theta_R2), 1e-3)
    loss_R = problem.loss(theta_R2)
    on = np.arange(len(theta_R2))  # the resamples that still move
    for _ in range(STEPS):
        left = problem.rows(on)
        step_R2 = _step(left, theta_R2[on], damping_R[on], low_2, high_2)
        trial_R2: Floats = np.clip(theta_R2[on] + step_R2, low_2, high_2)
        trial_loss_R, moved_R = left.loss(trial_R2), np.abs(trial_R2 - theta_R2[on]).max(axis=1)
        better_R = trial_loss_R < loss_R[on]
        theta_R2[on[better_R]] = trial_R2[better_R]
        loss_R[on[better_R]] = trial_loss_R[better_R]
        damping_R[on] = np.maximum(damping_R[on] * np.where(better_R, 0.2, 5.0), 1e-12)
        on = on[moved_R > TOLERANCE]
        if not on.size:
            break
    return theta_R2


def _step(
    problem: _Problem, theta_R2: Floats, damping_R: Floats, low_2: Floats, high_2: Floats
) -> Floats:
    matrix, right = problem.normal_equations(theta_R2)
    stuck = (theta_R2 <= low_2) & (right < 0) | (theta_R2 >= high_2) & (right > 0)
    right[stuck] = 0
    matrix[np.flatnonzero(stuck.any(axis=1))[:, None], [0, 1], [1, 0]] = 0  # the other moves alone
    diagonal = np.arange(2)
    matrix[:, diagonal, diagonal] *= 1 + damping_R[:, None]
    matrix[:, diagonal, diagonal] += TINY
    step_R2: Floats = np.clip(np.linalg.solve(matrix, right[..., None])[..., 0], -1, 1)
    return step_R2


def _rise(u_S: Floats, theta_R2: Floats) -> Floats:
    """The f of each resample, [R, S]."""
    f_RS: Floats = expit(np.exp(theta_R2[:, 1:]) * (u_S - theta_R2[:, :1]))
    return f_RS
