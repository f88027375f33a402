"""What a run of the reference model was: every rollout, every optimizer step, every broadcast."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_qrl.simulator.settings import Settings

Fate = Literal["consumed", "discarded", "queued", "running"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout of one sampler.

    Attributes:
        sampler: its number.
        start: when it began, in the model's unit, as all times are.
        end: when it was due to end, at the latest when the run did.
        queued: the tick at which it was put in the queue; None where it never was.
        versions: those that sampled it, each with the time from which it did.
        version: their mean over its ticks: how old it counts as.
        fate: what became of it by the end of the run.
        left: when it left the queue; None where it did not.
        step: the optimizer step that consumed it; None where none did.
    """

    sampler: int
    start: float
    end: float
    queued: float | None
    versions: tuple[tuple[float, int], ...]
    version: float
    fate: Fate
    left: float | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step.

    Attributes:
        start: when it began, in the model's unit, as all times are.
        end: when it ended, or would have.
        version: of the weights it began with.
        ages: versions that each of its rollouts was behind, in the order of their ends.
        staleness: their mean.
        mismatch: of the batch, as mean |Δlogprob|.
        dynamic: the part that acts on the drift.
        effective: the part of that which the optimizer cannot average away.
        kick: what was added to the drift; 0 for most.
        drift: after the step.
        shown: the mismatch with what the drift adds to it.
        reward: after the step.
    """

    start: float
    end: float
    version: int
    ages: tuple[float, ...]
    staleness: float
    mismatch: float
    dynamic: float
    effective: float
    kick: float
    drift: float
    shown: float
    reward: float


@dataclass(frozen=True, slots=True)
class Broadcast:
    """New weights on their way.

    Attributes:
        start: when the step that made them ended, in the model's unit, as all times are.
        end: when the samplers had them, or would have.
        version: of the weights.
    """

    start: float
    end: float
    version: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A run.

    Attributes:
        settings: what was set.
        duration: of the run, in the model's unit.
        floor: the mismatch that quantization alone makes.
        rollouts: in the order in which they began.
        steps: in order.
        broadcasts: in order; none without weight sync.
        diverged_at_step: the first step, from 0, of the last unbroken stretch of drift above the
            limit, if that lasts to the end; else None.
        final_reward: after the last step.
        final_drift: the same.
        mean_staleness: of the consumed rollouts; 0 if there are none.
        discarded: rollouts that became too old in the queue.
        sampler_utilization: share of all samplers' time in which a rollout was running.
        trainer_utilization: share of the time in which a step was.
        why_no_step: in words, where there was none; else None.
    """

    settings: Settings
    duration: float
    floor: float
    rollouts: tuple[Rollout, ...]
    steps: tuple[Step, ...]
    broadcasts: tuple[Broadcast, ...]
    diverged_at_step: int | None
    final_reward: float
    final_drift: float
    mean_staleness: float
    discarded: int
    sampler_utilization: float
    trainer_utilization: float
    why_no_step: str | None

    @property
    def optimizer_steps(self) -> int:
        """How many there were."""
        return len(self.steps)


def sampling(rollouts: Sequence[Rollout], duration: float) -> float:
    """Rollouts that were running, on average over a time."""
    time = 0.0
    for rollout in rollouts:
        time += (duration if rollout.queued is None else rollout.queued) - rollout.start
    return time / duration


def training(steps: Sequence[Step], duration: float) -> float:
    """Share of a time in which a step was running."""
    time = 0.0
    for step in steps:
        time += min(step.end, duration) - step.start
    return time / duration
