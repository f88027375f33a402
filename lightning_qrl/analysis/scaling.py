"""Learning curves: ScaleRL's sigmoid, and how far it is to be believed.

    R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

is the reward after compute C (Khatri et al., "The Art of Scaling Reinforcement Learning Compute for
LLMs", arXiv 2510.13786, equation 1): R_0 before training, A at infinite compute, half of the gain
at C_mid, B how steeply. It is fitted by least squares (see `sigmoid`), where the paper walks a grid
over A and C_mid; as there, the first part of a curve may be left out (`min_compute`). R_0 is
measured, not fitted: give it, or let the curve begin with it, at compute 0 say; then the noise of
that one value is part of every interval.

The paper puts +-0.02 on A from three runs. Here each fit has 95% intervals (see `bootstrap`):

- *several seeds*: whole curves are resampled and the fit repeated. The interval to report.
- *one seed*: its residuals are resampled, neighbours together. That covers the noise of evaluation
  and the passing fluctuations of *this* run. It does not cover what another seed would have done,
  nor that the truth may be no sigmoid.

A curve that has not bent fits any A beyond it: above one that rises, below one that falls. Then
C_mid reaches the edge of the search, the interval of A is open there, and `problems` says so.

R resamples with the fit itself as row 0, S points, K seeds, H points held out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_qrl.analysis.bootstrap import (
    RESAMPLES,
    independent_points,
    interval,
    likeness,
    open_interval,
    resampled_residuals,
    seed_weights,
    stretch,
)
from lightning_qrl.analysis.sensitivity import Estimate
from lightning_qrl.analysis.series import Floats, Series
from lightning_qrl.analysis.sigmoid import REACH, Sigmoids, box, fit_sigmoids
from lightning_qrl.errors import UserError

PARAMETERS = 3


@dataclass(frozen=True, eq=False, slots=True)
class SigmoidFit:
    """ScaleRL's sigmoid of one recipe.

    A value is NaN, and an end of an interval infinite or 0, where the data do not say.

    Attributes:
        r0: reward before training.
        a: reward at infinite compute.
        b: steepness.
        c_mid: compute at half of the gain.
        seeds: curves fitted together.
        points: measurements fitted, up to `max_compute`.
        residual_std: of the measurements about the curve.
        autocorrelation: of neighbouring residuals, 0 to 0.95; high if noise is slow or this no fit.
        problems: what is not identified, a sentence each.
    """

    r0: float
    a: Estimate
    b: Estimate
    c_mid: Estimate
    seeds: int
    points: int
    max_compute: float
    residual_std: float
    autocorrelation: float
    problems: tuple[str, ...]
    _draws: Sigmoids = field(repr=False)
    _stretch: float = field(repr=False)

    @property
    def identified(self) -> bool:
        """Whether A, B and C_mid all have an interval."""
        return not self.problems

    def predict(self, compute: float) -> Estimate:
        """The mean reward at some compute: of the curve, without the noise of a measurement."""
        return self.predict_mean(np.array([compute]))

    def predict_mean(self, compute: Floats) -> Estimate:
        """The mean of the curve over some values of compute."""
        found = interval(self._draws.at(compute).mean(axis=1), self._stretch)
        # Up to a tenth of the edge of the search the edge does not show.
        if compute.max() <= self.max_compute * REACH / 10 or math.isfinite(
            self.a.low + self.a.high
        ):
            return found
        return Estimate(
            math.nan,
            found.low if math.isfinite(self.a.low) else -math.inf,
            found.high if math.isfinite(self.a.high) else math.inf,
        )

    def __str__(self) -> str:
        numbers = f"A     {self.a}", f"B     {self.b}", f"C_mid {self.c_mid}"
        return "\n".join((*numbers, *self.problems))


@dataclass(frozen=True, eq=False, slots=True)
class Extrapolation:
    """What a fit to the first part of a curve says of the rest.

    Attributes:
        fit: to the first part.
        split: the compute where it ends.
        predicted: mean over the points held out.
        observed: mean of what was measured there, which has noise of its own.
        rmse: of what was measured there about the prediction.
    """

    fit: SigmoidFit
    split: float
    predicted: Estimate
    observed: float
    rmse: float

    @property
    def held(self) -> bool:
        """Whether the observed mean lies in the interval of the prediction."""
        return self.predicted.low <= self.observed <= self.predicted.high


def fit_sigmoid(
    curves: Series | Sequence[Series],
    *,
    r0: float | None = None,
    min_compute: float = 0.0,
    seed: int = 0,
) -> SigmoidFit:
    """Fit ScaleRL's sigmoid to one learning curve, or to those of several seeds together.

    Args:
        curves: reward against compute; one for each seed.
        r0: reward before training; None: the first value of a curve, a mean over seeds.
        min_compute: what came before it is not fitted.
        seed: of the bootstrap.

    Raises:
        UserError: fewer than four values of compute are left.
    """
    data = _pool([curves] if isinstance(curves, Series) else list(curves), min_compute)
    draws = _resample_seeds(data, r0, seed) if data.seeds > 1 else _resample_noise(data, r0, seed)
    error_S = data.y_S - draws.at(data.compute_S)[0]
    rho = likeness([error_S[data.seed_S == k] for k in range(data.seeds)], PARAMETERS)
    alone = independent_points(data.y_S.size, rho)
    factor = stretch(data.seeds, 1) if data.seeds > 1 else stretch(alone, PARAMETERS)
    a, b, c_mid, problems = _judge(draws, data.compute_S, factor)
    return SigmoidFit(
        r0=float(draws.floor_R[0]),
        a=a,
        b=b,
        c_mid=c_mid,
        seeds=data.seeds,
        points=data.y_S.size,
        max_compute=float(data.compute_S.max()),
        residual_std=math.sqrt(float(error_S @ error_S) / max(error_S.size - PARAMETERS, 1)),
        autocorrelation=rho,
        problems=problems,
        _draws=draws,
        _stretch=factor,
    )


def extrapolate(
    curves: Series | Sequence[Series],
    *,
    fraction: float = 0.5,
    r0: float | None = None,
    min_compute: float = 0.0,
    seed: int = 0,
) -> Extrapolation:
    """Fit the first part of the curves and predict the rest: the paper's test of its fits.

    Args:
        curves: see `fit_sigmoid`.
        fraction: the part of the largest compute that is fitted, between 0 and 1.
        r0: see `fit_sigmoid`.
        min_compute: see `fit_sigmoid`.
        seed: of the bootstrap.

    Raises:
        UserError: the fraction leaves nothing to predict, or too little to fit.
    """
    if not 0 < fraction < 1:
        raise UserError(f"fraction {fraction:g} must lie between 0 and 1")
    curves = [curves] if isinstance(curves, Series) else list(curves)
    split = fraction * max((float(c.x[-1]) for c in curves), default=0.0)
    first = [Series(c.x[c.x <= split], c.y[c.x <= split], c.name) for c in curves]
    fit = fit_sigmoid(first, r0=r0, min_compute=min_compute, seed=seed)
    compute_H = np.concatenate([c.x[c.x > split] for c in curves])
    observed_H = np.concatenate([c.y[c.x > split] for c in curves])
    error_H = observed_H - fit._draws.at(compute_H)[0]
    return Extrapolation(
        fit=fit,
        split=split,
        predicted=fit.predict_mean(compute_H),
        observed=float(observed_H.mean()),
        rmse=math.sqrt(float(np.mean(error_H**2))),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Data:
    """Curves in one list.

    Attributes:
        compute_S, y_S: what is fitted.
        seed_S: the curve that a point is of.
        first_K: the first value of each curve.
    """

    compute_S: Floats
    y_S: Floats
    seed_S: np.ndarray[tuple[int], np.dtype[np.intp]]
    first_K: Floats

    @property
    def seeds(self) -> int:
        return self.first_K.size


def _pool(curves: Sequence[Series], min_compute: float) -> _Data:
    # At compute 0 the curve is R_0 whatever its parameters, so that point has no say in them.
    kept = [(curve.x > 0) & (curve.x >= min_compute) for curve in curves]
    compute_S = np.concatenate([np.empty(0), *(c.x[k] for c, k in zip(curves, kept, strict=True))])
    if np.unique(compute_S).size <= PARAMETERS:
        name = curves[0].name if curves else "no curves"
        raise UserError(
            f"{name}: {np.unique(compute_S).size} values of compute above {min_compute:g}; "
            f"a sigmoid needs more than {PARAMETERS}"
        )
    for curve, k in zip(curves, kept, strict=True):
        if not k.any():
            raise UserError(f"{curve.name}: has no values at or above compute {min_compute:g}")
    return _Data(
        compute_S=compute_S,
        y_S=np.concatenate([c.y[k] for c, k in zip(curves, kept, strict=True)]),
        seed_S=np.repeat(np.arange(len(curves)), [int(k.sum()) for k in kept]),
        first_K=np.array([curve.y[0] for curve in curves]),
    )


def _resample_seeds(data: _Data, r0: float | None, seed: int) -> Sigmoids:
    weights_RK = seed_weights(data.seeds, np.random.default_rng(seed))
    distinct, row_R = np.unique(weights_RK, axis=0, return_inverse=True)  # few seeds: few of them
    floor_R = distinct @ data.first_K / data.seeds if r0 is None else np.full(len(distinct), r0)
    fits = fit_sigmoids(data.compute_S, data.y_S[None], distinct[:, data.seed_S], floor_R)
    return Sigmoids(fits.floor_R[row_R], fits.top_R[row_R], fits.theta_R2[row_R])


def _resample_noise(data: _Data, r0: float | None, seed: int) -> Sigmoids:
    floor = data.first_K if r0 is None else np.array([float(r0)])
    ones = np.ones((1, 1))
    curve_S = fit_sigmoids(data.compute_S, data.y_S[None], ones, floor).at(data.compute_S)[0]
    rng = np.random.default_rng(seed)
    noise_RS = resampled_residuals(data.y_S - curve_S, data.y_S.size + 1, PARAMETERS, rng)
    y_RS = np.concatenate([data.y_S[None], curve_S + noise_RS[:, 1:]])
    # A floor that was measured once is as noisy as any point: its noise is the column before.
    measured = np.concatenate([[0.0], noise_RS[:, 0]]) if r0 is None else 0.0
    return fit_sigmoids(data.compute_S, y_RS, ones, np.full(RESAMPLES + 1, floor[0]) + measured)


def _judge(
    draws: Sigmoids, compute_S: Floats, factor: float
) -> tuple[Estimate, Estimate, Estimate, tuple[str, ...]]:
    """A, B and C_mid with their intervals, open where these reach the edge of the search."""
    end_R = draws.at(compute_S.max(keepdims=True))[:, 0]
    end, moved = interval(end_R, factor), interval(end_R - draws.floor_R, factor)
    if moved.low <= 0 <= moved.high:
        nothing = Estimate(math.nan, 0.0, math.inf)
        problem = "A, B and C_mid are not identified: the reward moved no more than its noise"
        return Estimate(math.nan, -math.inf, math.inf), nothing, nothing, (problem,)
    edges = np.transpose(box(compute_S))
    c_mid, b = (open_interval(draws.theta_R2[:, i], edges[i], factor) for i in range(2))
    a = interval(draws.top_R, factor)
    problems = []
    if c_mid.high == math.inf or b.low == 0:
        value = math.nan if math.isnan(c_mid.value) or math.isnan(b.value) else a.value
        low, high = max(a.low, end.low), min(a.high, end.high)  # no curve passes its own A
        rising = moved.value > 0
        a = Estimate(value, low, math.inf) if rising else Estimate(value, -math.inf, high)
        side = f"at least {low:.4g}" if rising else f"at most {high:.4g}"
        problems.append(
            f"A is not identified: the curve has not bent by compute {compute_S.max():g}, and any "
            f"A of {side} fits"
        )
    if c_mid.low == 0:
        problems.append(f"C_mid is not identified: it may lie far below {compute_S.min():g}")
    if b.low == 0 or b.high == math.inf:
        problems.append("B is not identified: too few points lie where the reward changes")
    return a, b, c_mid, tuple(problems)
