"""How far the constants would move with other runs: the Bayesian bootstrap (Rubin 1981).

Each resample gives every run an exponential weight and finds the constants again, by one
Gauss-Newton step from the fit to all runs (a linear problem with the fit's own bounds). Unlike
drawing runs with replacement, it never loses the one synchronous run of a plan. Percentiles of few
runs lie too close, so deviations are stretched by sqrt(n / (n - 1)) t(n - 1) / 1.96; n counts
settings, as seeds of one setting tell little that is new of what depends on settings.

It covers what another seed and another choice of settings would have given. It does not cover that
the structure may be wrong: that is what `goodness` is for.

B resamples, W numbers that count, P constants, R runs.
"""

import math

import numpy as np

from lightning_qrl.simulator.calibrated.fit import Fit, slopes
from lightning_qrl.simulator.calibrated.runs import Runs
from lightning_qrl.simulator.calibrated.structure import box, constants
from lightning_qrl.simulator.calibrated.trajectories import Floats

RESAMPLES = 500
NORMAL = 1.959963984540054  # the normal quantile of the upper tail
RIDGE = 1e-9  # of a constant that no number depends on
SEED = 0

Interval = tuple[float, float]


def intervals(runs: Runs, whole: Fit) -> dict[str, Interval]:
    """95% intervals of what was fitted, floors as ``floor/PLAN``."""
    from scipy.special import stdtrit

    names = whole.structure.constants
    count = len({run.setting for run in runs.observed})
    found_BP = np.vstack([whole.values_P, _resampled(runs, whole)])
    values = constants(found_BP, whole.structure)
    made = {name: values[name] for name in names}
    for at, plan in enumerate(runs.plans, start=len(names)):
        made[f"floor/{plan}"] = found_BP[:, at]
    factor = math.sqrt(count / (count - 1)) * float(stdtrit(count - 1, 0.975)) / NORMAL
    return {name: _interval(values, factor) for name, values in made.items()}


def _resampled(runs: Runs, whole: Fit) -> Floats:
    from scipy.optimize import lsq_linear

    left_W, slope_WP = slopes(whole, runs)
    run_W = np.concatenate(runs.runs())
    size = len(whole.values_P)
    scale_P = np.maximum(np.abs(whole.values_P), 1e-3)
    square_RPP = np.zeros((len(runs.observed), size, size))
    pull_RP = np.zeros((len(runs.observed), size))
    for r in range(len(runs.observed)):
        own = slope_WP[run_W == r] * scale_P
        square_RPP[r], pull_RP[r] = own.T @ own, own.T @ left_W[run_W == r]
    low_P, high_P = (edge - whole.values_P for edge in box(runs, whole.structure))
    room = (np.minimum(low_P, 0) / scale_P - RIDGE, np.maximum(high_P, 0) / scale_P + RIDGE)
    weight_BR = np.random.default_rng(SEED).exponential(size=(RESAMPLES, len(runs.observed)))
    moved = []
    for weight_R in weight_BR:
        square_PP = np.tensordot(weight_R, square_RPP, 1)
        square_PP += RIDGE * max(1.0, float(np.trace(square_PP))) * np.eye(size)
        upper_PP = np.linalg.cholesky(square_PP).T
        aim_P = np.linalg.solve(upper_PP.T, -weight_R @ pull_RP)
        moved.append(lsq_linear(upper_PP, aim_P, bounds=room, method="bvls").x)
    found_BP: Floats = whole.values_P + np.clip(np.array(moved), *room) * scale_P
    return found_BP


def _interval(values: Floats, factor: float) -> Interval:
    low, high = np.quantile(values[1:], [0.025, 0.975])
    first = values[0]
    return max(0.0, float(first - factor * (first - low))), float(first + factor * (high - first))
