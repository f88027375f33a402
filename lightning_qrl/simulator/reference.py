"""The simulator of "The 4-bitter Lesson", tick for tick: a pure function from settings to a trace.

Samplers make rollouts, a queue holds them, one trainer takes a batch at a time. Each tick, in this
order: rollouts end; a step ends, and a broadcast with it or later; rollouts that are too old are
discarded; the trainer takes a batch; free samplers start. How a step acts on drift and reward is
`dynamics`. Random numbers come from one generator with a stream each for durations, kicks and
reward noise, so that a run is the same on every machine and in the browser.

The clock adds up ticks, and an event is due when it is at most 1e-9 away: both are what reproduces
the 288 outcomes of the table in ``tests/simulator``.

Source: the post's simulator. Deviation: the number of samplers and the seed can be set.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.dynamics import (
    divergence_step,
    floor,
    mismatch,
    next_drift,
    rewards,
)
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.streams import first_state, uniform
from lightning_qrl.simulator.trace import (
    Broadcast,
    Fate,
    Rollout,
    Step,
    Trace,
    sampling,
    training,
)

DUE, TOO_OLD = 1e-9, 1e-6


def simulate(settings: Settings, constants: Constants = POST) -> Trace:
    """Run the model.

    Args:
        settings: what can be set.
        constants: its numbers.

    Returns:
        All that happened. A run without a step says why (``why_no_step``).
    """
    run = _Run(settings, constants)
    for now in run.ticks():
        run.tick(now)
    return run.trace()


@dataclass(slots=True, eq=False)
class _Rollout:
    """A rollout while the run goes on."""

    sampler: int
    start: float
    end: float
    versions: list[tuple[float, int]]
    total: int = 0  # of versions, over its ticks
    ticks: int = 0
    queued: float | None = None
    fate: Fate = "running"
    left: float | None = None
    step: int | None = None

    def version(self) -> float:
        return self.total / self.ticks if self.ticks else float(self.versions[0][1])

    def leave(self, now: float, fate: Fate, step: int | None = None) -> None:
        self.left, self.fate, self.step = now, fate, step

    def frozen(self) -> Rollout:
        return Rollout(
            self.sampler, self.start, self.end, self.queued, tuple(self.versions), self.version(),
            self.fate, self.left, self.step,
        )  # fmt: skip


@dataclass
class _Run:
    settings: Settings
    constants: Constants
    busy: list[_Rollout | None] = field(init=False)
    held: list[int] = field(init=False)  # the version that each sampler has
    rollouts: list[_Rollout] = field(default_factory=list)
    queue: list[_Rollout] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    broadcasts: list[Broadcast] = field(default_factory=list)
    version: int = 0
    drift: float = 0.0
    due: float = 0.0  # of what comes next
    passed: int = 0  # ticks that rollouts have not counted yet
    training: bool = False
    sending: bool = False

    def __post_init__(self) -> None:
        self.busy = [None] * self.settings.samplers
        self.held = [0] * self.settings.samplers
        self.times, self.floor = self.constants.times, floor(self.settings, self.constants)
        self.h, self.tail = self.times.horizons[self.settings.horizon]
        self.factor = self.times.rollout_factor[self.settings.precision]
        factors = self.times.step_factor[self.settings.precision]
        self.step_time = self.times.step * factors[self.settings.backward]
        slope = self.times.window_slope * (self.h - 1)
        self.duration = math.floor(self.times.window * (1 + slope) + 0.5)
        seed = self.settings.seed
        streams = [uniform(first_state(own, seed)) for own in self.constants.seeds]
        self.durations, self.kicks, self.noise = streams

    def ticks(self) -> Iterator[float]:
        now = 0.0
        for _ in range(round(self.duration / self.times.tick)):
            yield now
            now += self.times.tick

    def tick(self, now: float) -> None:
        self.passed += 1
        if now < self.due - DUE:  # only what has been due can change what may begin
            return
        self._end_rollouts(now)
        self._end_step(now)
        self._discard(now)
        self._train(now)
        self._start_rollouts(now)
        self.due = self._next_due()

    def _next_due(self) -> float:
        """When a rollout, the step or the broadcast ends next."""
        due = min((r.end for r in self.busy if r is not None), default=math.inf)
        if self.training:
            due = min(due, self.steps[-1].end)
        if self.sending:
            due = min(due, self.broadcasts[-1].end)
        return due

    def _end_rollouts(self, now: float) -> None:
        self._count_ticks()
        for sampler, rollout in enumerate(self.busy):
            if rollout is not None and now >= rollout.end - DUE:
                rollout.queued, rollout.fate = now, "queued"
                self.queue.append(rollout)
                self.busy[sampler] = None

    def _count_ticks(self) -> None:
        for sampler, rollout in enumerate(self.busy):
            if rollout is not None:
                rollout.total += self.held[sampler] * self.passed
                rollout.ticks += self.passed
        self.passed = 0

    def _end_step(self, now: float) -> None:
        """A step ends, and a broadcast starts; it ends, and all samplers have the weights."""
        if self.training and now >= self.steps[-1].end - DUE:
            self.training = False
            self.version += 1
            if self.settings.weight_sync:
                bits = self.times.bits[self.settings.precision]
                end = now + self.times.broadcast_per_bit * bits
                self.broadcasts.append(Broadcast(now, end, self.version))
                self.sending = True
        if self.sending and now >= self.broadcasts[-1].end - DUE:
            self.sending = False
            self.held = [self.version] * len(self.held)
            for rollout in self.busy:
                if rollout is not None:
                    rollout.versions.append((now, self.version))

    def _discard(self, now: float) -> None:
        kept = []
        for rollout in self.queue:
            if self.version - rollout.version() > self.settings.max_staleness + TOO_OLD:
                rollout.leave(now, "discarded")
            else:
                kept.append(rollout)
        self.queue = kept

    def _train(self, now: float) -> None:
        batch = self.settings.batch
        if self.training or self.sending or len(self.queue) < batch or now >= self.duration:
            return
        self.queue.sort(key=lambda rollout: rollout.end)
        taken, self.queue = self.queue[:batch], self.queue[batch:]
        for rollout in taken:
            rollout.leave(now, "consumed", len(self.steps))
        ages = tuple(max(0.0, self.version - rollout.version()) for rollout in taken)
        self._step(now, ages)
        self.training = True

    def _step(self, now: float, ages: tuple[float, ...]) -> None:
        learning = self.constants.learning
        of = mismatch(ages, self.floor, learning)
        kick = self._kick()
        grown = next_drift(self.drift, of.effective, learning)
        self.drift = min(grown + kick, learning.drift_limit)
        staleness = 0.0
        for age in ages:
            staleness += age
        shown = of.mean + learning.drift_in_mismatch * self.drift
        self.steps.append(
            Step(
                now, now + self.step_time, self.version, ages, staleness / len(ages), of.mean,
                of.dynamic, of.effective, kick, self.drift, shown, math.nan,
            )
        )  # fmt: skip

    def _kick(self) -> float:
        """One draw, always; FP4 alone uses it."""
        draw, bound = next(self.kicks), 0.0
        fp4, settings = self.settings.precision == "fp4", self.settings
        for kick, may in (
            (self.constants.high_precision_kick, settings.backward == "high_precision"),
            (self.constants.plain_kick, not settings.four_over_six),
        ):
            if fp4 and may:
                if bound <= draw < bound + kick.probability:
                    return kick.size
                bound += kick.probability
        return 0.0

    def _start_rollouts(self, now: float) -> None:
        left, settings = self.duration - now, self.settings
        if left < self.times.last_start or len(self.queue) >= settings.batch:
            return
        waiting = len(self.queue) + sum(rollout is not None for rollout in self.busy)
        for sampler in range(settings.samplers):
            if self.busy[sampler] is not None:
                continue
            if settings.max_staleness == 0 and (
                self.training or self.sending or waiting >= settings.batch
            ):
                return
            if not settings.weight_sync:
                self.held[sampler] = self.version
            end = min(now + self._rollout_time(), float(self.duration))
            rollout = _Rollout(sampler, now, end, [(now, self.held[sampler])])
            self.busy[sampler] = rollout
            self.rollouts.append(rollout)
            waiting += 1

    def _rollout_time(self) -> float:
        times = self.times
        extra = -self.tail * math.log(1 - times.draw_share * next(self.durations))
        return (times.rollout_least + min(times.rollout_extra_limit, extra)) * self.factor * self.h

    def trace(self) -> Trace:
        self._count_ticks()
        learning, rollouts = self.constants.learning, tuple(map(_Rollout.frozen, self.rollouts))
        diverged = divergence_step([step.drift for step in self.steps], learning)
        of_steps = ((step.mismatch, step.drift, next(self.noise)) for step in self.steps)
        gained = rewards(of_steps, diverged, learning)
        steps = tuple(map(_rewarded, self.steps, gained))
        consumed = [age for step in steps for age in step.ages]
        return Trace(
            settings=self.settings,
            duration=float(self.duration),
            floor=self.floor,
            rollouts=rollouts,
            steps=steps,
            broadcasts=tuple(self.broadcasts),
            diverged_at_step=diverged,
            final_reward=steps[-1].reward if steps else learning.reward_start,
            final_drift=self.drift,
            mean_staleness=math.fsum(consumed) / len(consumed) if consumed else 0.0,
            discarded=sum(rollout.fate == "discarded" for rollout in rollouts),
            sampler_utilization=sampling(rollouts, self.duration) / self.settings.samplers,
            trainer_utilization=training(steps, self.duration),
            why_no_step=None if steps else self._why_no_step(),
        )

    def _why_no_step(self) -> str:
        ended = sum(rollout.queued is not None for rollout in self.rollouts)
        return (
            f"no optimizer step: {ended} rollouts end in {self.duration} units of time, and a "
            f"batch has {self.settings.batch}; take a smaller batch, more samplers, a faster "
            "precision or a shorter horizon"
        )


def _rewarded(step: Step, reward: float) -> Step:
    return replace(step, reward=reward)
