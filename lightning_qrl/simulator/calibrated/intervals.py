"""How far the constants would move with other runs: the Bayesian bootstrap (Rubin 1981).

Each resample gives every run an exponential weight and finds the constants again, by one
Gauss-Newton step from the fit to all runs (a linear problem with the fit's own bounds). Unlike
drawing runs with replacement, it never loses the one synchronous run of a plan. Percentiles of few
runs lie too close, so deviations are stretched by sqrt(n / (n - 1)) t(n - 1) / 1.96; n counts
settings, as seeds of one setting tell little that is new of what depends on settings. Ends are
stretched where the search is, so that none lies beyond it; one at its edge was not found: None.

Runs of one seed see the same prompts at a step, so their noise is shared. Where runs share seeds,
the weight of a run is its own times that of its seed (Owen and Eckles 2012, "Bootstrapping data
arrays of arbitrary order"); where each has its own seed, it is its own alone. On made runs of 12
settings, two thirds of the variance of their rewards shared within a seed, 94% of the intervals
held the truth with 2 seeds, and 98% with 5; 95% where all noise and all seeds were apart.

It covers what other seeds and another choice of settings would have given. Where all runs have one
seed, it does not cover another. It does not cover that the structure may be wrong: that is what
`goodness` is for.

B resamples, W numbers that count, P constants, R runs.
"""

import math

import numpy as np
from numpy.typing import NDArray

from lightning_qrl.simulator.calibrated.fit import Fit, slopes
from lightning_qrl.simulator.calibrated.runs import Runs
from lightning_qrl.simulator.calibrated.structure import box, constants
from lightning_qrl.simulator.calibrated.trajectories import Floats

RESAMPLES = 500
NORMAL = 1.959963984540054  # the normal quantile of the upper tail
RIDGE = 1e-9  # of a constant that no number depends on
NEAR = 0.01  # of the edge of the search, relative
SEED = 0

Interval = tuple[float | None, float | None]  # None: not found within the search


def intervals(runs: Runs, whole: Fit) -> dict[str, Interval]:
    """95% intervals of what was fitted, floors as ``floor/PLAN``."""
    from scipy.special import stdtrit

    count = len({run.setting for run in runs.observed})
    factor = math.sqrt(count / (count - 1)) * float(stdtrit(count - 1, 0.975)) / NORMAL
    low_P, high_P = np.quantile(_resampled(runs, whole), [0.025, 0.975], axis=0)
    least_P, most_P = box(runs, whole.structure)
    first_P = whole.values_P
    ends_2P = np.clip(first_P + factor * (np.array([low_P, high_P]) - first_P), least_P, most_P)
    at_edge_2P = _at_edge(ends_2P, np.array([least_P, most_P]))
    names = whole.structure.constants
    values = constants(ends_2P, whole.structure)
    made = {name: values[name] for name in names}
    for at, plan in enumerate(runs.plans, start=len(names)):
        made[f"floor/{plan}"] = ends_2P[:, at]
    return {
        name: _interval(ends, at_edge)
        for (name, ends), at_edge in zip(made.items(), at_edge_2P.T, strict=True)
    }


def _at_edge(ends_2P: Floats, edges_2P: Floats) -> NDArray[np.bool_]:
    """Where an end is where the search ends; 0 is an end like others."""
    near: NDArray[np.bool_] = np.abs(ends_2P[:, None] - edges_2P) <= NEAR * np.abs(edges_2P)
    found: NDArray[np.bool_] = (near & (edges_2P != 0)).any(axis=1)
    return found


def _interval(ends: Floats, at_edge: NDArray[np.bool_]) -> Interval:
    low, high = (None if lost else float(end) for end, lost in zip(ends, at_edge, strict=True))
    return (low, high) if ends[0] <= ends[1] else (high, low)


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
    moved = []
    for weight_R in _weights(runs):
        square_PP = np.tensordot(weight_R, square_RPP, 1)
        square_PP += RIDGE * max(1.0, float(np.trace(square_PP))) * np.eye(size)
        upper_PP = np.linalg.cholesky(square_PP).T
        aim_P = np.linalg.solve(upper_PP.T, -weight_R @ pull_RP)
        moved.append(lsq_linear(upper_PP, aim_P, bounds=room, method="bvls").x)
    found_BP: Floats = whole.values_P + np.clip(np.array(moved), *room) * scale_P
    return found_BP


def _weights(runs: Runs) -> Floats:
    """Of each run in each resample, [B, R]."""
    rng = np.random.default_rng(SEED)
    weight_BR: Floats = rng.exponential(size=(RESAMPLES, len(runs.observed)))
    seeds, seed_R = np.unique([run.seed for run in runs.observed], return_inverse=True)
    if seeds.size < len(runs.observed):
        weight_BR *= rng.exponential(size=(RESAMPLES, seeds.size))[:, seed_R]
    return weight_BR
