"""Runs a cluster and says what it did."""

import math
from collections import Counter
from collections.abc import Sequence

from lightning_qrl.simulator.cluster.clock import SECOND
from lightning_qrl.simulator.cluster.learned import learned
from lightning_qrl.simulator.cluster.outcome import (
    Counts,
    Distribution,
    Flow,
    Learned,
    Outcome,
    Phase,
    SamplerTime,
    Target,
    TrainerTime,
)
from lightning_qrl.simulator.cluster.settings import Cluster
from lightning_qrl.simulator.cluster.station import Station
from lightning_qrl.simulator.cluster.system import COMPLETIONS, System
from lightning_qrl.simulator.cluster.trainer import Training
from lightning_qrl.simulator.cluster.workload import check_workload
from lightning_qrl.simulator.constants import POST

TOY = (
    "mismatch, drift and reward are by the post's constants, a toy's, and say nothing of your own "
    "policy; --calibration FILE replaces them"
)


def run(cluster: Cluster) -> Outcome:
    """Simulate a cluster.

    Returns:
        All that was measured. A run without an optimizer step says why (``why_no_step``).

    Raises:
        ValueError: it would take more than about a minute.
    """
    check_workload(cluster)
    system = System(cluster)
    system.run()
    seconds = system.now / SECOND
    ended = [phase for phase in system.trainer.phases if phase.ended]
    steps = len(ended) * cluster.updates
    first_ages: Counter[int] = Counter()
    for phase in system.trainer.phases:
        first_ages.update(phase.first_ages)
    tokens = _tokens(cluster, system)
    of = learned([phase.ages for phase in ended], cluster.updates, cluster.floor, cluster.learning)
    gpus, rate = _gpus(cluster)
    hours = seconds / 3600
    assert system.stopped is not None, "a system is measured when it has run"
    return Outcome(
        seconds=seconds,
        stopped=system.stopped,
        why_no_step=None if steps else _why_no_step(cluster, system),
        notes=_notes(cluster, system),
        steps=steps,
        steps_per_hour=steps / hours,
        sampled_per_second=tokens.started / seconds,
        trained_per_second=sum(phase.tokens for phase in ended) / seconds,
        samplers=_sampler_time(cluster, system),
        trainers=_trainer_time(system),
        staleness=distribution(first_ages),
        token_staleness=distribution(system.trainer.token_ages),
        rollouts=_counts(
            system.flight.came,
            consumed=sum(len(phase.ages) for phase in system.trainer.phases),
            discarded=system.discarded,
            queued=len(system.queue),
            running=len(system.groups),
        ),
        tokens=tokens,
        queue=_flow(system.waiting, system.now),
        in_flight=_flow(system.flight, system.now),
        gpu_hours=gpus * hours,
        cost=rate * hours,
        learned=of,
        target=_target(cluster, of, ended),
        phases=tuple(_phase(phase) for phase in system.trainer.phases),
    )


def distribution(counts: Counter[int]) -> Distribution:
    """Of whole numbers that occur so often."""
    values = sorted(counts.items())
    total = sum(counts.values())
    if not total:
        return Distribution(0.0, 0, 0, 0, 0, ())
    mean = sum(value * count for value, count in values) / total
    p50, p90, p99 = (_quantile(values, percent, total) for percent in (50, 90, 99))
    return Distribution(mean, p50, p90, p99, values[-1][0], tuple(values))


def _quantile(values: Sequence[tuple[int, int]], percent: int, total: int) -> int:
    so_far = 0
    for value, count in values:
        so_far += count
        if 100 * so_far >= percent * total:
            return value
    raise AssertionError("the last value has all of them")


def _phase(of: Training) -> Phase:
    return Phase(
        begin=of.begin / SECOND,
        end=(of.begin + max(of.shares)) / SECOND if of.ended else None,
        version=of.version,
        ages=tuple(sorted(of.first_ages.items())),
        mean_age=sum(of.ages) / len(of.ages),
        waiting=of.waiting,
        discarded=of.discarded,
        waited=of.waited / SECOND,
        tokens=of.tokens,
    )


def _tokens(cluster: Cluster, system: System) -> Counts:
    """Tokens of completions that are still at work count as far as they are sampled."""
    if cluster.in_flight_update:
        for of in system.running:
            of.change_weights(system.trainer.syncs, system.now, system.reread[of.pool])
    under_way = sum(of.sampled(system.now) for of in system.running)
    finished = sum(sum(group.spans.values()) for group in system.groups)
    return _counts(
        system.sampled + under_way,
        consumed=sum(phase.tokens for phase in system.trainer.phases),
        discarded=system.discarded_tokens,
        queued=sum(sum(group.tokens) for group in system.queue),
        running=finished + under_way,
    )


def _counts(started: int, consumed: int, discarded: int, queued: int, running: int) -> Counts:
    left = consumed + discarded
    share = discarded / left if left else 0.0
    return Counts(started, consumed, discarded, queued, running, share)


def _flow(of: Station, now: int) -> Flow:
    return Flow(
        mean_number=of.area / now,
        most=of.most,
        per_second=of.came / (now / SECOND),
        mean_seconds=of.stays / of.came / SECOND if of.came else 0.0,
    )


def _sampler_time(cluster: Cluster, system: System) -> SamplerTime:
    busy = list(system.busy)
    for completion in system.running:
        busy[completion.pool] += system.now - completion.start
    slots = [pool.slots for pool in cluster.samplers]
    whole = sum(slots) * system.now
    idle = (whole - sum(busy)) / whole
    synchronous = cluster.max_staleness == 0
    return SamplerTime(
        busy=sum(busy) / whole,
        rereading=sum(system.reading) / whole,
        waits_for_queue=0.0 if synchronous else idle,
        waits_for_weights=idle if synchronous else 0.0,
        busy_by_pool=tuple(b / (n * system.now) for b, n in zip(busy, slots, strict=True)),
    )


def _trainer_time(system: System) -> TrainerTime:
    busy = training = 0
    count = 1
    for phase in system.trainer.phases:
        past = system.now - phase.begin
        count = len(phase.shares)
        busy += sum(min(share, past) for share in phase.shares)
        training += min(max(phase.shares), past)
    whole = count * system.now
    blocked = count * system.trainer.blocked
    return TrainerTime(
        busy=busy / whole,
        waits_for_slowest=(count * training - busy) / whole,
        waits_for_data=(whole - count * training - blocked) / whole,
        waits_for_weights=blocked / whole,
    )


def _gpus(cluster: Cluster) -> tuple[float, float]:
    """All GPUs, and what they cost an hour."""
    of_trainers = cluster.trainers.count * cluster.trainers.gpus
    gpus = of_trainers + sum(pool.gpus for pool in cluster.samplers)
    rate = of_trainers * cluster.trainers.price
    return gpus, rate + sum(pool.gpus * pool.price for pool in cluster.samplers)


def _target(cluster: Cluster, of: Learned, ended: Sequence[Training]) -> Target | None:
    if cluster.target_reward is None:
        return None
    for number, reward in enumerate(of.reward):
        if reward >= cluster.target_reward:
            phase = ended[number // cluster.updates]
            hours = (phase.begin + max(phase.shares)) / SECOND / 3600
            gpus, rate = _gpus(cluster)
            return Target(cluster.target_reward, number + 1, hours, gpus * hours, rate * hours)
    why_not = why_not_reached(cluster.target_reward, cluster.learning.reward_ceiling, of)
    return Target(cluster.target_reward, None, None, None, None, why_not)


def why_not_reached(target: float, ceiling: float, of: Learned) -> str:
    """What keeps a reward from being reached, and what to do."""
    if not of.reward:
        return "there is no optimizer step"
    if of.diverged_at_step is not None:
        return f"the drift diverges at step {of.diverged_at_step}; lower max_staleness"
    if target >= ceiling:
        return f"no policy gets beyond {ceiling:g}; lower target_reward"
    return f"the reward ends at {of.reward[-1]:.3f}; raise duration"


def _why_no_step(cluster: Cluster, system: System) -> str:
    seconds = system.now / SECOND
    if system.trainer.phases:
        (phase,) = system.trainer.phases
        lasts, begin = max(phase.shares) / SECOND, phase.begin / SECOND
        return (
            f"no optimizer step: the first phase of training begins at {begin:g} s and lasts "
            f"{lasts:g} s, and the run ends at {seconds:g} s; raise duration"
        )
    came = system.waiting.came
    return (
        f"no optimizer step: {came} rollouts are finished in {seconds:g} s, and a batch has "
        f"{cluster.batch}; raise duration or samplers.slots, or lower batch"
    )


def _notes(cluster: Cluster, system: System) -> tuple[str, ...]:
    notes = []
    if system.stopped == "completions":
        notes.append(
            f"stopped after {COMPLETIONS} completions, at {system.now / SECOND:g} s; "
            "shorten duration or lower steps"
        )
    cap = cluster.max_staleness
    oldest = [max(phase.first_ages) for phase in system.trainer.phases]
    reached = max(oldest, default=math.inf)
    if cap is not None and not system.discarded and cap > reached:
        notes.append(f"max_staleness={cap} was never reached: the oldest rollout was {reached}")
    if cluster.learning == POST.learning and any(phase.ended for phase in system.trainer.phases):
        notes.append(TOY)
    return tuple(notes)
