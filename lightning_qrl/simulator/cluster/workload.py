"""How much there is to simulate, before it is: what would take minutes is refused in one line.

An estimate from rates, not a bound: samplers make no more than their speed allows, and where they
wait for the queue no more than the trainer takes or discards. It is good to a factor of three; what
it misses is cut after `system.COMPLETIONS`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_qrl.simulator.cluster.lengths import Empirical, Lognormal
from lightning_qrl.simulator.cluster.settings import Cluster

MOST_SECONDS = 60.0  # of one run
COMPLETION, PHASE, STEP, AGE = 1e-5, 7e-5, 2e-6, 5e-7  # seconds of a core for each, rounded up
SPAN = 1.5e-6  # of a completion between two weight syncs, with in_flight_update
DISCARDED = 2  # batches for each that is trained on, where nothing else bounds them
DRAWN = 4096  # lengths, for their mean


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run is made of.

    Attributes:
        completions: begun.
        phases: of training.
        seconds: that simulating it takes, roughly.
    """

    completions: float
    phases: float
    seconds: float


def workload(cluster: Cluster) -> Workload:
    """What there will be to simulate, by the rates of both sides."""
    tokens = _mean_tokens(cluster.lengths)
    slots = sum(pool.slots for pool in cluster.samplers)
    sampled = sum(pool.slots * pool.tokens_per_second for pool in cluster.samplers) / tokens
    batch = cluster.batch * cluster.group_size
    training = _phase_seconds(cluster, batch * tokens)
    sampling = batch / sampled
    phase = training + sampling if cluster.max_staleness == 0 else max(training, sampling)
    asked = math.inf if cluster.steps is None else -(-cluster.steps // cluster.updates)
    seconds = min(math.inf if cluster.duration is None else cluster.duration, asked * phase)
    phases = min(asked, seconds / phase)
    completions = slots + seconds * sampled
    if cluster.max_staleness == 0 or cluster.when_full == "wait":
        completions = min(completions, _taken(cluster, phases, slots))
    steps = phases * cluster.updates
    cost = COMPLETION * completions + PHASE * phases + steps * (STEP + AGE * cluster.batch)
    if cluster.in_flight_update:
        cost += SPAN * slots * phases / cluster.weight_sync_every  # every slot finds out later
    return Workload(completions, phases, cost)


def check_workload(cluster: Cluster, runs: int = 1) -> None:
    """Raise ValueError where so many runs would take more than about a minute."""
    of = workload(cluster)
    seconds, times = runs * of.seconds, f" {runs} times" if runs > 1 else ""
    if seconds <= MOST_SECONDS:
        return
    keys = [key for key in ("duration", "steps") if getattr(cluster, key) is not None]
    if cluster.steps is None:
        keys.append("samplers.slots")
    steps = of.phases * cluster.updates
    raise ValueError(
        f"{_count(of.completions)} completions and {_count(steps)} optimizer steps take about "
        f"{_time(seconds)} to simulate{times}, and a minute is the most; lower {' or '.join(keys)}"
    )


@lru_cache(maxsize=64)
def _mean_tokens(lengths: Lognormal | Empirical) -> float:
    return float(lengths.draw(np.random.default_rng(0), DRAWN).mean())


def _phase_seconds(cluster: Cluster, tokens: float) -> float:
    """Of training, with what of the weights it waits for."""
    trainers = cluster.trainers
    training = tokens / (trainers.count * trainers.tokens_per_second)
    blocked = cluster.weights.seconds if cluster.weights.blocks_trainer else 0.0
    return cluster.updates * trainers.overhead + training + blocked / cluster.weight_sync_every


def _taken(cluster: Cluster, phases: float, slots: int) -> float:
    """Completions where samplers wait: trained on, discarded in between, left over."""
    batch = cluster.batch * cluster.group_size
    left = slots + batch * (cluster.queue_depth or 0)
    if cluster.max_staleness == 0:
        return (phases + 1) * batch
    if cluster.queue_depth is None:
        return math.inf
    return phases * batch * (1 if cluster.max_staleness is None else 1 + DISCARDED) + left


def _count(value: float) -> str:
    if value >= 1e9:
        return f"{value:.0e}".replace("e+", "e")
    return f"{float(f'{value:.2g}'):,.0f}"


def _time(seconds: float) -> str:
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {name}"
    return f"{seconds:.0f} seconds"
