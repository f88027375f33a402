"""How many rollouts a prompt should get, by how much compute there is.

Sampling costs C = n * B_p * M rollouts: n for each prompt, B_p prompts, M updates. The IsoCompute
Playbook (arXiv 2603.12151) trains with several n, takes at each budget C the n whose curve of
reward against C is the highest, and finds that this n*(C) grows and saturates:

    log n*(C) = log n_low + (log n_high - log n_low) / (1 + (C_mid / C)^B)

Their workflow with four changes. They summarize each n's curve by a sigmoid through its record-
breaking points; records of a noisy curve lie above it, and the more so the more often it was
evaluated, so here each curve is the non-decreasing one of least squares (isotonic regression),
interpolated in log C and averaged over seeds. No curve is continued past its last point: budgets
end where the first of them does. n* is taken between the n that were run, at the vertex of the
parabola in log n through the best and its neighbours, where they smooth the staircase by a running
average. And they give no intervals.

Intervals (95%) resample the seeds of each n, whole curves, and repeat the choice and the fit. The
deviations of each resampled mean are stretched for few seeds first (see `bootstrap`), with the
degrees of freedom of all n together. Beyond the largest n that was run nothing is known.

R resamples with the sample itself as row 0, K budgets, N values of n.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import stdtrit

from lightning_qrl.analysis.bootstrap import NORMAL, TAILS, open_interval, seed_weights
from lightning_qrl.analysis.sensitivity import Estimate
from lightning_qrl.analysis.series import Floats, Series
from lightning_qrl.analysis.sigmoid import REACH, Sigmoids, box, fit_sigmoids
from lightning_qrl.errors import UserError

BUDGETS = 32
PARAMETERS = 4
UNKNOWN = Estimate(math.nan, 0.0, math.inf)


@dataclass(frozen=True, eq=False, slots=True)
class RolloutAllocation:
    """The best number of rollouts a prompt, against compute.

    A value is NaN, and an end of an interval infinite or 0, where the data do not say.

    Attributes:
        rollouts: the n that were run, ascending.
        budgets_K: compute, in rollouts, ascending.
        reward_KN: mean reward of each n at each budget; NaN before its first measurement.
        support_KN: the share of resamples in which this n is the best.
        best: the best at each budget, of the n that were run.
        low: n at small compute.
        high: n at large compute, where it saturates.
        c_mid: compute halfway between them in log n.
        b: steepness.
        problems: what is not identified, a sentence each.
    """

    rollouts: tuple[int, ...]
    budgets_K: Floats
    reward_KN: Floats
    support_KN: Floats
    best: tuple[Estimate, ...]
    low: Estimate
    high: Estimate
    c_mid: Estimate
    b: Estimate
    problems: tuple[str, ...]
    _draws: Sigmoids = field(repr=False)

    def predict(self, compute: float) -> Estimate:
        """The sigmoid's n at some compute; open where that lies outside the budgets."""
        found = _open_n(self._draws.at(np.array([compute]))[:, 0], self.rollouts)
        if self.best[0].high == math.inf:  # one seed
            return Estimate(found.value, 0.0, math.inf)
        if compute > self.budgets_K[-1] and self.high.high == math.inf:
            return Estimate(math.nan, found.low, math.inf)
        if compute < self.budgets_K[0]:
            return Estimate(math.nan, 0.0, found.high)
        return found


def allocate_rollouts(
    runs: Mapping[int, Sequence[Series]],
    *,
    budgets: Sequence[float] | None = None,
    seed: int = 0,
) -> RolloutAllocation:
    """The best n at each budget, and its sigmoid.

    Args:
        runs: by n, the curves of its seeds: reward against rollouts sampled (n * B_p * M).
        budgets: compute at which n are compared; None: `BUDGETS` of them, evenly spaced in log C,
            from where two n have been measured to where the first curve ends.
        seed: of the bootstrap.

    Raises:
        UserError: fewer than two n, an n without a curve, or no budget to compare them at.
    """
    rollouts = tuple(sorted(runs))
    if len(rollouts) < 2 or rollouts[0] < 1 or not all(runs[n] for n in rollouts):
        raise UserError(
            f"n = {list(rollouts)}: two values of n or more, each with a curve, compare"
        )
    curves = [[_rising(curve) for curve in runs[n]] for n in rollouts]
    budgets_K = _budgets(curves, budgets)
    seeds = [len(group) for group in curves]
    reward_RKN = np.stack(
        [
            _resampled_mean(np.stack([_at(curve, budgets_K) for curve in group]), seeds, seed + i)
            for i, group in enumerate(curves)
        ],
        axis=-1,
    )
    best_RK = np.nanargmax(reward_RKN, axis=2)
    n_RK = np.array(rollouts, dtype=np.float64)[best_RK]
    log_n_RK = _between(np.log(rollouts), reward_RKN, best_RK)
    draws = fit_sigmoids(budgets_K, log_n_RK, np.ones((1, 1)), None)
    found = _judge(draws, budgets_K, n_RK, rollouts)
    if min(seeds) < 2:
        found = _without_intervals(found, rollouts[seeds.index(min(seeds))])
    return RolloutAllocation(
        rollouts=rollouts,
        budgets_K=budgets_K,
        reward_KN=reward_RKN[0],
        support_KN=np.stack([(best_RK[1:] == i).mean(axis=0) for i in range(len(seeds))], axis=-1),
        best=found.best,
        low=found.low,
        high=found.high,
        c_mid=found.c_mid,
        b=found.b,
        problems=found.problems,
        _draws=draws,
    )


def _between(log_n_N: Floats, reward_RKN: Floats, best_RK: NDArray[np.intp]) -> Floats:
    """The logarithm of n*: the vertex of the parabola through the best n and its neighbours."""
    middle = np.clip(best_RK, 1, max(log_n_N.size - 2, 1))
    x0, x1, x2 = (log_n_N[np.minimum(middle + i, log_n_N.size - 1)] for i in (-1, 0, 1))
    y0, y1, y2 = (
        np.take_along_axis(reward_RKN, np.minimum(middle + i, log_n_N.size - 1)[..., None], axis=2)[
            ..., 0
        ]
        for i in (-1, 0, 1)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        rise, fall = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
        vertex = (x0 + x1) / 2 - rise / 2 * (x2 - x0) / (fall - rise)
    inside = (best_RK == middle) & np.isfinite(vertex)
    found: Floats = np.where(inside, vertex, log_n_N[best_RK])
    return found


def _rising(curve: Series) -> Series:
    """The non-decreasing curve of least squares, without compute 0."""
    after = curve.x > 0
    if not after.any():
        raise UserError(f"{curve.name}: has no values at a compute above 0")
    return Series(curve.x[after], isotonic_regression(curve.y[after]).x, curve.name)


def _budgets(curves: Sequence[Sequence[Series]], budgets: Sequence[float] | None) -> Floats:
    """Budgets at which two n have been measured at least, and none is past its end."""
    begins = sorted(max(curve.x[0] for curve in group) for group in curves)
    first, last = begins[1], min(curve.x[-1] for group in curves for curve in group)
    if first >= last:
        raise UserError(
            f"no budget to compare n at: the second n is first measured at {first:g}, and the "
            f"first curve ends at {last:g}"
        )
    if budgets is None:
        return np.geomspace(first, last, BUDGETS, dtype=np.float64)
    asked = np.unique(np.asarray(budgets, dtype=np.float64))
    if asked.size < PARAMETERS or asked[0] < first or asked[-1] > last:
        raise UserError(
            f"budgets: {PARAMETERS} or more are needed, all within {first:g} to {last:g}, where "
            "two n have been measured and no curve has ended"
        )
    return asked


def _at(curve: Series, budgets_K: Floats) -> Floats:
    """A curve at the budgets, linear in log C; NaN before its first measurement."""
    y_K: Floats = np.interp(np.log(budgets_K), np.log(curve.x), curve.y)
    y_K[budgets_K < curve.x[0] * (1 - 1e-12)] = np.nan  # geomspace's ends are rounded
    return y_K


def _resampled_mean(reward_seeds_K: Floats, seeds: Sequence[int], seed: int) -> Floats:
    """The mean curve of one n in each resample, [R, K]; row 0 is the mean itself."""
    count = len(reward_seeds_K)
    weights = seed_weights(count, np.random.default_rng(seed)) / count
    mean_RK: Floats = weights @ reward_seeds_K
    if count == 1:
        return mean_RK  # nothing to resample; the intervals are left open
    free = sum(seeds) - len(seeds)
    factor = math.sqrt(count / (count - 1)) * float(stdtrit(free, TAILS[1])) / NORMAL
    mean_RK[1:] = mean_RK[0] + factor * (mean_RK[1:] - mean_RK[0])
    return mean_RK


@dataclass(frozen=True, slots=True)
class _Found:
    best: tuple[Estimate, ...]
    low: Estimate
    high: Estimate
    c_mid: Estimate
    b: Estimate
    problems: tuple[str, ...]


def _judge(draws: Sigmoids, budgets_K: Floats, best_RK: Floats, rollouts: Sequence[int]) -> _Found:
    """Estimates, open where the n or the budgets that were tried do not reach."""
    best = tuple(_chosen(column_R) for column_R in best_RK.T)
    if len(set(best_RK[0])) == 1:
        problem = f"n* is {best[0].value:g} at every budget: where it would change is not known"
        return _Found(best, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, (problem,))
    edges = np.transpose(box(budgets_K))
    c_mid, b = (open_interval(draws.theta_R2[:, i], edges[i], 1.0) for i in range(2))
    low, high = (_open_n(level_R, rollouts) for level_R in (draws.floor_R, draws.top_R))
    problems = []
    if best[-1].high >= rollouts[-1] or not c_mid.high < budgets_K[-1]:
        high = Estimate(math.nan, high.low, math.inf)
        problems.append(
            f"where n* saturates is not identified: n* = {best[-1].high:g} is possible at the "
            f"largest budget, {budgets_K[-1]:g}; try larger n, or more compute"
        )
    if best[0].low <= rollouts[0] or not c_mid.low > budgets_K[0]:
        low = Estimate(math.nan, 0.0, low.high)
        problems.append(
            f"n* at small compute is not identified: n* = {best[0].low:g} is possible at the "
            f"smallest budget, {budgets_K[0]:g}"
        )
    if b.low == 0 or b.high == math.inf:
        problems.append("B is not identified: n* changes within too few budgets, or too slowly")
    return _Found(best, low, high, c_mid, b, tuple(problems))


def _open_n(log_n_R: Floats, rollouts: Sequence[int]) -> Estimate:
    """An n from its logarithms, open where it is far from every n that was run."""
    edges = np.log([rollouts[0] / REACH, rollouts[-1] * REACH])
    return open_interval(log_n_R, edges, 1.0)


def _chosen(n_R: Floats) -> Estimate:
    """One of the n that were run, with an interval of such n."""
    low, high = np.quantile(n_R[1:], TAILS, method="inverted_cdf")
    return Estimate(float(n_R[0]), float(low), float(high))


def _without_intervals(found: _Found, n: int) -> _Found:
    def bare(estimate: Estimate) -> Estimate:
        return Estimate(estimate.value, 0.0, math.inf)

    best = tuple(bare(estimate) for estimate in found.best)
    low, high, c_mid, b = (bare(x) for x in (found.low, found.high, found.c_mid, found.b))
    problem = f"no interval is known: n = {n} has one seed"
    return _Found(best, low, high, c_mid, b, (problem, *found.problems))
