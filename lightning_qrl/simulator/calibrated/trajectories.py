"""The model of a run, for many runs and many sets of constants at once.

It is `dynamics`, step by step, with the lags that the runs had instead of a clock:

    mismatch_t = E[s(g)] + f + drift_in_mismatch drift_t,    s(g) = scale g^power

and drift and reward as there. Two terms are new; with settling = erosion = 0 it is the post's:

    s(g) <- s(g) room(t - g)^settling,   f <- f room(t)^settling
    room(v) = (ceiling - reward_v) / (ceiling - start)
    reward_(t+1) <- reward_(t+1) - erosion mean_t (1 - room(t))^erosion_power (ceiling - start)

Settling: a policy that has little left to learn moves less in a step and is surer of its tokens, so
a version behind costs less late in a run. Erosion: a batch from another policy takes away some of
what was learned, the more there is to lose, so a run ends where learning and that are equal. In the
post's model mismatch can only slow a run down, and all runs that do not diverge tend to one
ceiling.

What a step trains on was sampled g versions ago, and so was the reward that is measured on it:
E[reward_(t-g)].

A run that has diverged does not collapse here: `divergence` ends runs before that.

C sets of constants, R runs, S steps, K ages of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_qrl.simulator.calibrated.observed import Lags
from lightning_qrl.simulator.constants import Learning

Floats = NDArray[np.float64]
LEAST_ROOM = 1e-6
NEW = ("settling", "erosion", "erosion_power")  # constants that `Learning` has not


@dataclass(frozen=True, eq=False)
class Ages:
    """The lags of some runs, padded to one length.

    Attributes:
        age_SRK: versions behind.
        share_SRK: of the tokens; 0 where a run has fewer ages, or has ended.
    """

    age_SRK: Floats
    share_SRK: Floats

    @classmethod
    def of(cls, runs: Sequence[Sequence[Lags]]) -> "Ages":
        """Pad: a run that has ended goes on with fresh tokens, which nothing looks at."""
        steps = max(len(run) for run in runs)
        most = max(len(lags) for run in runs for lags in run)
        age_SRK = np.zeros((steps, len(runs), most))
        share_SRK = np.zeros_like(age_SRK)
        share_SRK[:, :, 0] = 1.0
        for r, run in enumerate(runs):
            for s, lags in enumerate(run):
                share_SRK[s, r, 0] = 0.0
                for k, (age, share) in enumerate(lags):
                    age_SRK[s, r, k], share_SRK[s, r, k] = age, share
        return cls(age_SRK, share_SRK)


class Trajectories(NamedTuple):
    """What the model says, [C, S, R] but for ``reward``."""

    mismatch: Floats  # as it would be measured, drift's part included
    sampled: Floats  # reward of what a step trains on
    drift: Floats  # after each step
    reward: Floats  # [C, S + 1, R] of each version


def trajectories(constants: Mapping[str, Floats], floor_CR: Floats, ages: Ages) -> Trajectories:
    """Run the model.

    Args:
        constants: by the names in `Learning`, and those in `NEW`; each [C].
        floor_CR: of each run's plan.
        ages: of the runs.
    """
    c = {name: value[:, None] for name, value in constants.items()}
    steps, runs, _ = ages.age_SRK.shape
    sets = floor_CR.shape[0]
    reward = np.empty((sets, steps + 1, runs))
    reward[:, 0] = c["reward_start"]
    room = np.ones((sets, steps + 1, runs))
    mismatch, sampled, drifts = (np.empty((sets, steps, runs)) for _ in range(3))
    cost_CSRK = c["staleness_scale"][..., None, None] * (
        ages.age_SRK ** c["staleness_power"][..., None, None]
    )
    version_SRK = np.arange(steps)[:, None, None] - np.rint(ages.age_SRK).astype(int)
    np.maximum(version_SRK, 0, out=version_SRK)
    drift, run_RK = np.zeros((sets, runs)), np.arange(runs)[:, None]
    drifts_at_all, settles = bool(np.any(c["gain"])), bool(np.any(c["settling"]))
    for s in range(steps):
        share_RK, version_RK = ages.share_SRK[s], version_SRK[s]
        own = (cost_CSRK[:, s] * room[:, version_RK, run_RK] * share_RK).sum(axis=2)
        floor = floor_CR * room[:, s]
        sampled[:, s] = (reward[:, version_RK, run_RK] * share_RK).sum(axis=2)
        if drifts_at_all:
            drift = _next_drift(drift, own + c["floor_share"] * floor, c)
        drifts[:, s] = drift
        mismatch[:, s] = own + floor + c["drift_in_mismatch"] * drift
        reward[:, s + 1] = _next_reward(reward[:, s], own + floor, drift, c)
        if settles:
            room[:, s + 1] = _room(reward[:, s + 1], c)
    return Trajectories(mismatch, sampled, drifts, reward)


def _next_drift(drift: Floats, dynamic: Floats, c: Mapping[str, Floats]) -> Floats:
    effective = dynamic**2 / (dynamic + c["half"])
    grown = effective * (c["gain"] + c["feedback"] * drift**2)
    kept = drift + grown - c["decay"] * drift
    return np.minimum(np.maximum(kept, 0.0), c["drift_limit"])


def _next_reward(reward: Floats, mean: Floats, drift: Floats, c: Mapping[str, Floats]) -> Floats:
    kept = np.maximum(c["least_progress"], 1.0 - (mean / c["mismatch_limit"]) ** 2)
    lost = np.minimum(c["drift_cost_limit"], c["drift_cost"] * drift)
    learned = c["reward_rate"] * (c["reward_ceiling"] - reward) * kept * (1.0 - lost)
    new: Floats = reward + learned
    if not np.any(c["erosion"]):
        return new
    whole = c["reward_ceiling"] - c["reward_start"]
    got = np.maximum(0.0, reward - c["reward_start"]) / whole
    eroded = np.minimum(got, c["erosion"] * mean * got ** c["erosion_power"]) * whole
    new -= eroded
    return new


def _room(reward: Floats, c: Mapping[str, Floats]) -> Floats:
    left = (c["reward_ceiling"] - reward) / (c["reward_ceiling"] - c["reward_start"])
    room: Floats = np.maximum(left, LEAST_ROOM) ** c["settling"]
    return room


def as_arrays(learning: Learning, new: Mapping[str, float]) -> dict[str, Floats]:
    """One set of constants, for `trajectories`; of those in `NEW`, what is missing is 0."""
    values = {**dict.fromkeys(NEW, 0.0), **vars(learning), **new}
    return {name: np.array([value]) for name, value in values.items()}
