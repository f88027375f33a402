"""A cluster with constants that were fitted to runs: what it starts from, what its steps do.

What runs tell of times is one number a side: the medians of a step's sampling, with all of its
completions side by side, and of its update. So a cluster starts as what the runs were: a trainer
that takes a step's tokens in the time of an update, slots for a step's completions that together
make them in the time of its sampling, weights that are there at once, no GPUs. What is set besides
is taken as it is, and where it leaves what the runs were, a note says so.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_qrl.cli.simulating.calibration import plan_of, read_calibration

if TYPE_CHECKING:
    from lightning_qrl.simulator.calibrated import Calibration
    from lightning_qrl.simulator.cluster import Cluster, Outcome
    from lightning_qrl.simulator.cluster.outcome import Learned, Phase, Target

SPEED = "tokens_per_second"
FAR = 0.25  # of a length from that of the runs, relative


def find_calibration(file: Path | None, given: dict[str, Any]) -> "tuple[Calibration | None, str]":
    """A calibration and the plan of it that ``plan=NAME`` names, which is taken out.

    Raises:
        UserError: there is no calibration in the file, or no such plan in it.
    """
    if file is None:
        return None, ""
    calibration = read_calibration(file)
    return calibration, plan_of(calibration, given.pop("plan", None))


def fitted_values(
    calibration: "Calibration", name: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The cluster that the runs were.

    Args:
        calibration: the constants.
        name: of the plan.
        given: what is set, which is laid over it.

    Raises:
        ValueError: what is set is the calibration's, or it lacks what the calibration has not.
    """
    for key in ("learning", "floor"):
        if key in given:
            raise ValueError(f"{key} is the calibration's with --calibration; take it out")
    plan, domain = calibration.plan(name), calibration.domain
    completions = _completions(calibration)
    made: dict[str, Any] = {
        "learning": calibration.learning,
        "floor": plan.floor,
        "batch": domain.batch[1],
        "group_size": domain.group_size,
        "weights": {"parameters": 0.0, "latency": 0.0},
    }
    if not given.keys() & {"steps", "duration"}:
        made |= {"steps": domain.steps, "duration": None}
    tokens = plan.tokens
    if tokens is not None and "lengths" not in given:
        tokens = _whole(tokens, completions)
        length = tokens / completions
        made["lengths"] = {"mean": length, "spread": 0.0, "limit": max(8192, int(length))}
    made["trainers"] = _trainers(_part(given, "trainers"), name, tokens, plan.update_seconds)
    if not isinstance(given.get("samplers"), list):
        pool = {"slots": completions, "gpus": 0, **_part(given, "samplers")}
        _check_price("samplers", _part(given, "samplers"))
        made["samplers"] = _samplers(pool, name, tokens, plan.sampling_seconds)
    return made


def _completions(calibration: "Calibration") -> int:
    """Of a step of the runs."""
    return calibration.domain.batch[1] * calibration.domain.group_size


def _whole(tokens: float, completions: int) -> float:
    """Tokens of a step whose completions are all as long as the runs' mean, in whole tokens.

    A step of so many tokens stands for one of the runs.
    """
    return float(completions * max(1, round(tokens / completions)))


def _trainers(
    given: Mapping[str, Any], plan: str, tokens: float | None, seconds: float | None
) -> dict[str, Any]:
    _check_price("trainers", given)
    made = {"count": 1, "gpus": 0}
    if SPEED in given:
        return made
    if given.get("count", 1) != 1:
        raise ValueError(
            "trainers.count is 1 with --calibration, whose runs do not say what more are worth; "
            f"take it out, or give trainers.{SPEED}"
        )
    return {**made, SPEED: _speed(plan, "trainers", tokens, seconds), "overhead": 0.0}


def _samplers(
    pool: Mapping[str, Any], plan: str, tokens: float | None, seconds: float | None
) -> dict[str, Any]:
    slots = pool["slots"]
    made = {"slots": slots, "gpus": pool["gpus"]}
    if SPEED in pool or not isinstance(slots, int):  # what is no number, the cluster refuses
        return made
    return {**made, SPEED: _six_digits(_speed(plan, "samplers", tokens, seconds) / max(1, slots))}


def _check_price(side: str, given: Mapping[str, Any]) -> None:
    if "price" in given and "gpus" not in given:
        raise ValueError(
            f"{side}.price does nothing with --calibration, whose runs had no GPUs; take it out, "
            f"or give {side}.gpus"
        )


def _speed(plan: str, side: str, tokens: float | None, seconds: float | None) -> float:
    if tokens is None or seconds is None:
        raise ValueError(
            f"{side}.{SPEED} is not known of {plan}, whose runs have no times in the calibration; "
            "give it"
        )
    return _six_digits(tokens / seconds)


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def predicted(
    cluster: "Cluster", outcome: "Outcome", calibration: "Calibration", plan: str
) -> "Outcome":
    """An outcome with what a calibration says of it; ``effective`` stays as it was."""
    from lightning_qrl.simulator.calibrated import predict
    from lightning_qrl.simulator.cluster.outcome import Learned

    notes = (*outcome.notes, *calibration.notes, *_notes(cluster, calibration, plan))
    if not outcome.steps:
        return replace(outcome, notes=notes)
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
    target = _target(cluster, outcome, learned)
    notes = tuple(dict.fromkeys((*notes, *found.notes)))
    return replace(outcome, learned=learned, target=target, notes=notes)


def notes_on_margin(calibration: "Calibration | None") -> tuple[str, ...]:
    """What the search for the largest stable staleness leaves out of a calibration."""
    new = () if calibration is None else ("settling", "erosion")
    without = [name for name in new if getattr(calibration, name)]
    if not without:
        return ()
    return (
        f"--margin judges without the calibration's {' and '.join(without)}: by the mismatch of a "
        "policy that has not learned yet, which is the largest",
    )


def _notes(cluster: "Cluster", calibration: "Calibration", name: str) -> Iterator[str]:
    """Where a cluster is not what the runs were."""
    plan, domain, completions = (
        calibration.plan(name),
        calibration.domain,
        _completions(calibration),
    )
    trainers, pools = cluster.trainers, cluster.samplers
    slots = sum(pool.slots for pool in pools)
    speeds = [pool.slots * pool.tokens_per_second for pool in pools]
    trains = not trainers.overhead and _as_in_runs(
        [trainers.tokens_per_second], plan.update_seconds, plan.tokens, completions
    )
    samples = _as_in_runs(speeds, plan.sampling_seconds, plan.tokens, completions)
    yield (
        "samplers and trainer work side by side, each as fast as in the runs, where one waited for "
        "the other"
    )
    for side, same in (("trainers", trains), ("samplers", samples)):
        if not same:
            yield f"{side}: their speed is what was set, not the calibration's"
    if cluster.group_size != domain.group_size:
        yield f"group_size={cluster.group_size} is not the {domain.group_size} that the runs show"
    if samples and slots != completions:
        yield (
            f"samplers.slots={slots} share the speed that the runs' {completions} completions had "
            "side by side"
        )
    if plan.tokens is None:
        return
    shown, mean = plan.tokens / completions, _mean_length(cluster)
    far = abs(mean / shown - 1) > FAR and mean != _whole(plan.tokens, completions) / completions
    if far:
        yield f"completions of {mean:.3g} tokens are not the {shown:.3g} that the runs show"
    if trains and (far or cluster.batch * cluster.group_size != completions):
        yield (
            f"a phase of training takes {plan.update_seconds:.3g} s for each {plan.tokens:.0f} "
            "tokens, as in the runs; other effects of its size are not known"
        )
    if trains and cluster.updates != 1:
        yield f"updates={cluster.updates} of a phase take together as long as the runs' one"


def _as_in_runs(
    speeds: list[float], seconds: float | None, tokens: float | None, completions: int
) -> bool:
    """Whether one side's speed is that of the runs."""
    if len(speeds) > 1 or seconds is None or tokens is None:
        return False
    steps = (tokens, _whole(tokens, completions))
    return any(math.isclose(speeds[0], step / seconds, rel_tol=1e-5) for step in steps)


def _part(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What is set of a part; nothing where that is no mapping, which the cluster refuses."""
    part = given.get(key, {})
    return part if isinstance(part, dict) else {}


def _mean_length(cluster: "Cluster") -> float:
    from lightning_qrl.simulator.cluster.lengths import Lognormal

    lengths = cluster.lengths
    if isinstance(lengths, Lognormal):
        return lengths.mean
    return sum(lengths.values) / len(lengths.values)


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
