"""What a simulated cluster did: plain numbers in real units, each defined over the whole window.

The window goes from an empty system at 0 to the end. What the end cuts counts up to it.
"""

from dataclasses import dataclass
from typing import Literal

Stopped = Literal["duration", "steps", "completions"]


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of training: one batch.

    Attributes:
        begin: seconds.
        end: seconds; None where the window ended before.
        version: of the weights it began with.
        ages: pairs of an age and the rollouts whose first token is that many versions old.
        mean_age: of its tokens in versions, averaged over rollouts.
        waiting: rollouts in the queue when it began, its own among them.
        discarded: rollouts since the last phase began.
        waited: seconds that the trainer waited for rollouts.
        tokens: that it trains on.
    """

    begin: float
    end: float | None
    version: int
    ages: tuple[tuple[int, int], ...]
    mean_age: float
    waiting: int
    discarded: int
    waited: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of whole numbers; all 0 where there are none.

    Attributes:
        mean: their mean.
        p50: the least value that at least half of them do not exceed; so on.
        p90: 90%.
        p99: 99%.
        largest: of all.
        counts: pairs of a value and how often it occurs, ascending.
    """

    mean: float
    p50: int
    p90: int
    p99: int
    largest: int
    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Where rollouts, or their tokens, are at the end: started is the sum of all others.

    Attributes:
        started: by samplers. Of tokens: sampled.
        consumed: taken by the trainer.
        discarded: too old, or dropped from a full queue.
        queued: wait for the trainer.
        running: not finished.
        discarded_share: of what has left the queue; 0 where nothing has.
    """

    started: int
    consumed: int
    discarded: int
    queued: int
    running: int
    discarded_share: float


@dataclass(frozen=True, slots=True)
class Flow:
    """Little's law of one place: ``mean_number`` = ``per_second`` x ``mean_seconds``.

    Attributes:
        mean_number: rollouts there, over time.
        most: at one time, for more than an instant.
        per_second: that came.
        mean_seconds: that each of them was there within the window.
    """

    mean_number: float
    most: int
    per_second: float
    mean_seconds: float


@dataclass(frozen=True, slots=True)
class SamplerTime:
    """Shares of the samplers' time; all but ``rereading`` add up to 1.

    Attributes:
        busy: at completions.
        rereading: part of ``busy``: prefixes read again after a weight sync, at completions that
            were finished.
        waits_for_queue: the queue was full.
        waits_for_weights: synchronous only: the batch is complete, the weights are not there yet.
        busy_by_pool: ``busy`` of each pool alone.
    """

    busy: float
    rereading: float
    waits_for_queue: float
    waits_for_weights: float
    busy_by_pool: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TrainerTime:
    """Shares of the trainers' time, which add up to 1.

    Attributes:
        busy: at their own share of a step.
        waits_for_slowest: another trainer had more tokens.
        waits_for_data: too few rollouts in the queue.
        waits_for_weights: weights were sent.
    """

    busy: float
    waits_for_slowest: float
    waits_for_data: float
    waits_for_weights: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What the steps did, by the equations of `simulator.dynamics`, without kicks and noise.

    One value for each optimizer step that was completed; the u-th step on a batch finds it u
    versions older.

    Attributes:
        mismatch: mean |Δlogprob| of the step's batch.
        effective: what of it the optimizer cannot average away.
        drift: after the step.
        reward: after the step.
        diverged_at_step: from 0; None if it did not.
    """

    mismatch: tuple[float, ...]
    effective: tuple[float, ...]
    drift: tuple[float, ...]
    reward: tuple[float, ...]
    diverged_at_step: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """What it takes to reach the reward that was asked for.

    Attributes:
        reward: that was asked for.
        steps: optimizer steps to it; None if it is not reached within the window.
        hours: from the start.
        gpu_hours: of all GPUs.
        cost: of these, in dollars.
        why_not: in words, where it is not reached, and what to do.
    """

    reward: float
    steps: int | None
    hours: float | None
    gpu_hours: float | None
    cost: float | None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run of a cluster.

    Attributes:
        seconds: the window.
        stopped: what ended it.
        why_no_step: in words, where no optimizer step was completed; else None.
        notes: what else one should know before one believes the numbers.
        steps: optimizer steps completed.
        steps_per_hour: over the window.
        sampled_per_second: tokens.
        trained_per_second: tokens of phases that were completed.
        samplers: where their time went.
        trainers: the same.
        staleness: of rollouts when their phase began: versions that the first token was behind.
        token_staleness: of their tokens.
        rollouts: where they are.
        tokens: where they are.
        queue: finished rollouts that wait.
        in_flight: rollouts from their first completion's start to their last one's end.
        gpu_hours: of all GPUs, busy or not.
        cost: of these, in dollars.
        learned: drift and reward.
        target: what the target reward takes; None where none was asked for.
        phases: in order.
    """

    seconds: float
    stopped: Stopped
    why_no_step: str | None
    notes: tuple[str, ...]
    steps: int
    steps_per_hour: float
    sampled_per_second: float
    trained_per_second: float
    samplers: SamplerTime
    trainers: TrainerTime
    staleness: Distribution
    token_staleness: Distribution
    rollouts: Counts
    tokens: Counts
    queue: Flow
    in_flight: Flow
    gpu_hours: float
    cost: float
    learned: Learned
    target: Target | None
    phases: tuple[Phase, ...]
