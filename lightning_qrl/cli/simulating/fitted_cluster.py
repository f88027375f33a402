"""A cluster with constants that were fitted to runs: what it starts from, what its steps do."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_qrl.errors import UserError

if TYPE_CHECKING:
    from lightning_qrl.simulator.calibrated import Calibration
    from lightning_qrl.simulator.cluster import Cluster, Outcome
    from lightning_qrl.simulator.cluster.outcome import Learned, Phase, Target


def find_calibration(file: Path | None, given: dict[str, Any]) -> "tuple[Calibration | None, str]":
    """A calibration and the plan of it that ``plan=NAME`` names, which is taken out."""
    if file is None:
        return None, ""
    from lightning_qrl.cli.simulating.calibration import plan_of, read_calibration

    calibration = read_calibration(file)
    for key in ("learning", "floor"):
        if key in given:
            raise UserError(f"{key} is the calibration's with --calibration; take it out")
    return calibration, plan_of(calibration, given.pop("plan", None))


def fitted_values(
    calibration: "Calibration", name: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Learning, floor and times of a plan: one trainer, and slots that are together its sampler."""
    from lightning_qrl.simulator.cluster import Samplers

    plan = calibration.plan(name)
    made: dict[str, Any] = {"learning": calibration.learning, "floor": plan.floor}
    if plan.update_seconds is not None:
        trainers = {"count": 1, "tokens_per_second": math.inf, "overhead": plan.update_seconds}
        made["trainers"] = trainers
    if plan.seconds_per_token is not None:
        pool = given.get("samplers")
        slots = pool.get("slots", Samplers().slots) if isinstance(pool, dict) else Samplers().slots
        made["samplers"] = {"tokens_per_second": 1 / (plan.seconds_per_token * slots)}
    return made


def predicted(
    cluster: "Cluster", outcome: "Outcome", calibration: "Calibration", plan: str
) -> "Outcome":
    """An outcome with what a calibration says of its steps; ``effective`` stays as it was."""
    from lightning_qrl.simulator.calibrated import predict
    from lightning_qrl.simulator.cluster.outcome import Learned

    ages = [
        [age + update for age in _token_ages(phase)]
        for phase in outcome.phases
        if phase.end is not None
        for update in range(cluster.updates)
    ]
    found = predict(calibration, plan, ages, cluster.batch)
    of_drift = calibration.learning.drift_in_mismatch
    mismatch = [of - of_drift * d for of, d in zip(found.mismatch, found.drift, strict=True)]
    learned = Learned(
        tuple(mismatch), outcome.learned.effective, found.drift, found.reward,
        found.diverged_at_step,
    )  # fmt: skip
    notes = (*outcome.notes, *calibration.notes, *found.notes)
    target = _target(cluster, outcome, learned)
    return replace(outcome, learned=learned, target=target, notes=tuple(dict.fromkeys(notes)))


def _token_ages(phase: "Phase") -> list[float]:
    """Ages of a phase's rollouts: those of first tokens, less what all tokens are younger."""
    first = [age for age, count in phase.ages for _ in range(count)]
    younger = sum(first) / len(first) - phase.mean_age
    return [max(0.0, age - younger) for age in first]


def _target(cluster: "Cluster", outcome: "Outcome", learned: "Learned") -> "Target | None":
    """What the target reward takes, by these rewards of the steps."""
    from lightning_qrl.simulator.cluster.measure import why_not_reached
    from lightning_qrl.simulator.cluster.outcome import Target

    wanted, ceiling = cluster.target_reward, cluster.learning.reward_ceiling
    if wanted is None:
        return None
    step = next((step for step, reward in enumerate(learned.reward) if reward >= wanted), None)
    end = None if step is None else outcome.phases[step // cluster.updates].end
    if step is None or end is None:
        return Target(wanted, None, None, None, None, why_not_reached(wanted, ceiling, learned))
    share = end / outcome.seconds
    return Target(wanted, step + 1, end / 3600, share * outcome.gpu_hours, share * outcome.cost)
