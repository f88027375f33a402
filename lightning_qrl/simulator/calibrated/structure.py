"""What the model may consist of, and which of its constants are searched for where.

What is not fitted is the post's: `half` and `floor_share`, which runs cannot tell from `gain`;
`drift_in_mismatch`, which is the unit of drift; the limits; and what follows a divergence.
`mismatch_limit` is searched for as its inverse square, in which "no limit" is a place like others.

P constants that are searched for, floors last; C sets of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightning_qrl.simulator.calibrated.runs import Runs
from lightning_qrl.simulator.calibrated.trajectories import Floats, as_arrays
from lightning_qrl.simulator.constants import POST

FLOOR = 0.01  # of a plan without a synchronous run, to begin with
LEAST_LIMIT = 1e-3  # the least 1 / mismatch_limit² of the search


@dataclass(frozen=True)
class Structure:
    """Which parts the model has.

    Attributes:
        settling: mismatch falls as the policy learns.
        erosion: mismatch takes away what was learned.
        drift: mismatch adds up to drift, and drift costs reward.
    """

    settling: bool = False
    erosion: bool = False
    drift: bool = False

    @property
    def constants(self) -> tuple[str, ...]:
        """What is fitted, beside the floors."""
        of_drift = ("gain", "feedback", "decay", "drift_cost") if self.drift else ()
        of_settling = ("settling",) if self.settling else ()
        of_erosion = ("erosion", "erosion_power") if self.erosion else ()
        return (
            "staleness_scale", "staleness_power", "reward_start", "reward_ceiling", "reward_rate",
            "mismatch_limit", *of_drift, *of_settling, *of_erosion,
        )  # fmt: skip


def constants(values_CP: Floats, structure: Structure) -> dict[str, Floats]:
    """From what is searched for, [C, P], to the model's constants, [C] each."""
    sets = len(values_CP)
    base = POST.learning
    if not structure.drift:
        base = replace(base, gain=0.0, feedback=0.0, drift_cost=0.0)
    all_constants = {name: np.repeat(v, sets) for name, v in as_arrays(base, {}).items()}
    for p, name in enumerate(structure.constants):
        all_constants[name] = values_CP[:, p]
    all_constants["mismatch_limit"] = all_constants["mismatch_limit"] ** -0.5
    return all_constants


def guess(runs: Runs, structure: Structure) -> Floats:
    """Where a search begins: what plain means of the runs suggest."""
    rewards = np.concatenate([run.reward for run in runs.observed])
    stale = [run for run in runs.observed if not run.synchronous]
    slope = np.median([np.mean(run.mismatch) / max(run.usual_lag, 1.0) for run in stale])
    means: Mapping[str, float] = {
        "staleness_scale": float(slope),
        "staleness_power": 1.0,
        "reward_start": float(np.mean([run.reward[0] for run in runs.observed])),
        "reward_ceiling": float(np.quantile(rewards, 0.95)),
        "reward_rate": 0.06,
        "mismatch_limit": 1.0,
        "gain": 0.1,
        "feedback": 0.1,
        "decay": 0.12,
        "drift_cost": 0.1,
        "settling": 0.5,
        "erosion": 0.1,
        "erosion_power": 2.0,
    }
    floors = [
        float(np.mean(np.concatenate(own))) if own else FLOOR
        for at in range(len(runs.plans))
        for own in [[run.mismatch for r, run in enumerate(runs.observed)
                     if run.synchronous and runs.plan_R[r] == at]]
    ]  # fmt: skip
    found_P: Floats = np.array([means[name] for name in structure.constants] + floors)
    return found_P


def box(runs: Runs, structure: Structure) -> tuple[Floats, Floats]:
    """What a search may try: least and most, [P] each."""
    rewards = np.concatenate([run.reward for run in runs.observed])
    least, most = float(rewards.min()), float(rewards.max())
    span = max(most - least, 1e-3)
    middle = 0.5 * (least + most)
    limits: Mapping[str, tuple[float, float]] = {
        "staleness_scale": (0.0, 10.0),
        "staleness_power": (0.1, 4.0),
        "reward_start": (least - span, middle),
        "reward_ceiling": (middle + 1e-3 * span, most + span),
        "reward_rate": (1e-4, 1.0),
        "mismatch_limit": (LEAST_LIMIT, 1e4),
        "gain": (0.0, 100.0),
        "feedback": (0.0, 100.0),
        "decay": (0.0, 1.0),
        "drift_cost": (0.0, 4.0),
        "settling": (0.0, 4.0),
        "erosion": (0.0, 10.0),
        "erosion_power": (0.0, 30.0),
    }
    ends = [*(limits[name] for name in structure.constants), *[(0.0, 10.0)] * len(runs.plans)]
    low_P, high_P = np.array(ends).T
    return low_P, high_P
