"""Which weights sample which tokens: a simulation of samplers, queue and trainer on a clock.

No model is involved, and none is needed: how long a group of completions takes is drawn from the
seed and the group's number, never from what is sampled.

* A sampler works at one group (a prompt and its G completions) at a time, in the order of the
  prompts, for d = completion_time on average, lognormal. d is the time of max_new_tokens tokens, at
  even distances; the sampler is busy for all of it. It starts no group while queue_depth rollouts
  wait.
* The trainer takes the groups that wait longest as soon as there are enough for a rollout. A phase
  of training takes one unit of time for each of its optimizer steps.
* After every weight_sync_every-th phase the samplers get the weights: with the next group that each
  starts, or with the next token (in_flight_update).
* A group whose first token is more than max_staleness versions old when the trainer could take it
  is discarded, and its prompt is the next that is sampled, in another time. As d is independent of
  the completions, discarding favours none of them. No prompt is lost.

So with completion_time 0 the lag is 0, 1, .. Q phases, then Q for good, Q = queue_depth. What
happens until a phase begins is independent of all that comes later: a run that goes on for longer
goes on the same. Deviation from real engines, where long completions are the late ones.

The clock counts whole ticks, so that simultaneous events are simultaneous. At one time, in this
order: the trainer ends a phase, groups are finished, the trainer begins one, samplers start.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_qrl.asynchrony.settings import Asynchrony
from lightning_qrl.seeding import derive_seed

TICKS = 1_000_000  # of the clock in the time of an optimizer step
PHASES, GROUPS = 500, 40_000  # that are tried, after the ramp; at most so many are started


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a group's completions that one version samples: from ``begin`` up to ``end``."""

    version: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its completions: its number in the stream of prompts, and who samples it."""

    number: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of training.

    Attributes:
        number: how many there were before.
        groups: what is trained on, in the order in which it was finished.
        waiting: groups in the queue when the phase began, its own among them.
        discarded: groups that became too old since the last one began.
        waited: time that the trainer had to wait.
    """

    number: int
    groups: tuple[Group, ...]
    waiting: int
    discarded: int
    waited: float


class _Running(NamedTuple):
    """A group at work, or finished; sorts by its end."""

    end: int
    order: int  # of the starts
    start: int
    number: int
    attempt: int
    version: int


class Schedule:
    """Yields one phase after the other.

    Args:
        asynchrony: with ``max_staleness`` above 0.
        groups: groups of a phase; where there are several ranks, each has its own and one and the
            same schedule.
        samplers: that fill the queue.
        updates: optimizer steps of a phase.
        tokens: length limit of a completion.
        seed: decides how long groups take.

    Attributes:
        reach: phases that a group can be behind.
        started: groups that samplers have begun with.

    Raises:
        ValueError: the trainer would wait for ever, or nothing could be stale.
    """

    def __init__(
        self,
        asynchrony: Asynchrony,
        *,
        groups: int,
        samplers: int,
        updates: int,
        tokens: int,
        seed: int,
    ) -> None:
        asynchrony.check(updates)
        self.asynchrony, self.updates, self.tokens, self.seed = asynchrony, updates, tokens, seed
        self.reach = asynchrony.max_staleness // updates
        self._groups = groups
        self._limit = asynchrony.depth(updates) * groups
        self._idle = samplers
        self._window: deque[Phase] = deque()
        self._now = self._free = self._ended = 0  # the trainer is free at; phases that ended
        self._begun = 0  # phases
        self._syncs = [(0, 0)]  # when samplers got which version
        self._running: list[_Running] = []
        self._queue: list[_Running] = []
        self._judged = 0  # the first of them, which are young enough for the phase that is next
        self._returned: list[tuple[int, int]] = []  # prompts of discarded groups, and attempts
        self.started = self._numbers = self._discarded = 0

    def window(self, first: int) -> list[Phase]:
        """Phase ``first`` and the ``reach`` phases after it; ``first`` may not go back.

        These are all that can train on tokens that the weights of phase ``first`` sample.
        """
        while self._begun <= first + self.reach:
            self._window.append(self.next_phase())
        while self._window[0].number < first:
            self._window.popleft()
        assert self._window[0].number == first, "a schedule is read forwards"
        return list(self._window)

    def work(self, phase: int) -> list[tuple[Group, Span]]:
        """What the weights that phase ``phase`` begins with sample, as far as it is trained on."""
        version = phase * self.updates
        ahead = (group for later in self.window(phase) for group in later.groups)
        return [(g, span) for g in ahead for span in g.spans if span.version == version]

    def next_phase(self) -> Phase:
        """Let time pass until the trainer takes its next groups."""
        while True:
            self._end_phase()
            self._finish_groups()
            if self._ended == self._begun:  # the trainer is free
                self._discard()
                if len(self._queue) >= self._groups:
                    return self._begin_phase()
            if not self._start_group():
                ends = [self._running[0].end] if self._running else []
                self._now = min([*ends, self._free] if self._ended < self._begun else ends)

    def _end_phase(self) -> None:
        if self._ended < self._begun and self._now == self._free:
            self._ended, self._judged = self._ended + 1, 0
            if self._ended % self.asynchrony.weight_sync_every == 0:
                self._syncs.append((self._now, self._ended * self.updates))

    def _finish_groups(self) -> None:
        while self._running and self._running[0].end == self._now:
            self._queue.append(heapq.heappop(self._running))
            self._idle += 1

    def _discard(self) -> None:
        oldest = self._ended * self.updates - self.asynchrony.max_staleness
        if oldest <= 0:
            return
        kept = []
        for group in self._queue[self._judged :]:
            if group.version >= oldest:
                kept.append(group)
            else:
                heapq.heappush(self._returned, (group.number, group.attempt + 1))
                self._discarded += 1
        self._queue[self._judged :] = kept
        self._judged = len(self._queue)

    def _begin_phase(self) -> Phase:
        taken, waiting = self._queue[: self._groups], len(self._queue)
        del self._queue[: self._groups]
        groups = tuple(Group(g.number, self._spans(g)) for g in taken)
        waited = (self._now - self._free) / TICKS
        phase = Phase(self._begun, groups, waiting, self._discarded, waited)
        self._begun, self._discarded = self._begun + 1, 0
        self._free = self._now + self.updates * TICKS
        self._forget_syncs()
        return phase

    def _start_group(self) -> bool:
        """Let one sampler start, if one may."""
        if not self._idle or len(self._queue) >= self._limit:
            return False
        if self._returned:
            number, attempt = heapq.heappop(self._returned)
        else:
            number, attempt = self._numbers, 0
            self._numbers += 1
        end, version = self._now + self._duration(number, attempt), self._syncs[-1][1]
        group = _Running(end, self.started, self._now, number, attempt, version)
        heapq.heappush(self._running, group)
        self._idle, self.started = self._idle - 1, self.started + 1
        return True

    def _duration(self, number: int, attempt: int) -> int:
        mean, spread = self.asynchrony.completion_time, self.asynchrony.completion_time_spread
        if not spread:
            return round(mean * TICKS)
        variance = math.log1p(spread**2)  # of the logarithm
        draw = random.Random(derive_seed(self.seed, "completion time", number, attempt))
        time = mean * math.exp(draw.gauss(0.0, math.sqrt(variance)) - variance / 2)
        return round(time * TICKS)

    def _spans(self, group: _Running) -> tuple[Span, ...]:
        """Who samples its tokens: token t is begun when t / tokens of its time have passed."""
        changes = [(0, group.version)]
        if self.asynchrony.in_flight_update:
            time = group.end - group.start
            changes += [
                (-((group.start - at) * self.tokens // time), version)
                for at, version in self._syncs
                if group.start < at < group.end
            ]
        ends = [begin for begin, _ in changes[1:]] + [self.tokens]
        spans = (Span(version, b, e) for (b, version), e in zip(changes, ends, strict=True))
        return tuple(span for span in spans if span.begin < span.end)

    def _forget_syncs(self) -> None:
        """Keep those that a group which is still at work, or waits, may have seen."""
        if not self.asynchrony.in_flight_update:
            del self._syncs[:-1]
            return
        first = min((g.start for g in [*self._running, *self._queue]), default=self._now)
        while len(self._syncs) > 1 and self._syncs[1][0] <= first:
            del self._syncs[0]


def check_reach(asynchrony: Asynchrony, groups: int, updates: int) -> None:
    """Raise ValueError where no group gets as old as is allowed.

    Without completion times the lag is known: until the first group of new weights has passed the
    queue, each phase trains on groups of version 0. With them the schedule is tried, with a seed
    that is no run's, so that no run is refused for its seed. One of very many groups is too long to
    try, and is believed.

    Args:
        asynchrony: the knobs.
        groups: prompts of a rollout.
        updates: optimizer steps on one.
    """
    if not asynchrony.max_staleness:
        return
    asynchrony.check(updates)
    allowed, odd = divmod(asynchrony.max_staleness, updates)
    samplers = asynchrony.samplers or groups
    if asynchrony.completion_time:
        oldest = _oldest(asynchrony, groups, samplers, updates)
        of_all = f"of the first {allowed + PHASES} rollouts"
    else:
        behind = asynchrony.depth(updates) + asynchrony.weight_sync_every - 1
        oldest, of_all = min(allowed, behind), "of all"
    if oldest < allowed or odd:
        raise ValueError(
            f"max_staleness={asynchrony.max_staleness} is out of reach: the oldest group "
            f"{of_all} is {oldest * updates} versions old; set max_staleness={oldest * updates}, "
            f"or let more groups wait (queue_depth={asynchrony.depth(updates)}, "
            f"samplers={samplers}), or let them take longer "
            f"(completion_time={asynchrony.completion_time:g})"
        )


def _oldest(asynchrony: Asynchrony, groups: int, samplers: int, updates: int) -> int:
    """Phases that the oldest group of many is behind, as far as that matters."""
    whole = replace(asynchrony, in_flight_update=False)  # a group is as old as its first token
    seed = derive_seed(0, "reach")
    schedule = Schedule(
        whole, groups=groups, samplers=samplers, updates=updates, tokens=1, seed=seed
    )
    oldest = 0
    for number in range(schedule.reach + PHASES):
        if schedule.started > GROUPS:
            return schedule.reach
        phase = schedule.next_phase()
        ages = (number - group.spans[0].version // updates for group in phase.groups)
        oldest = max(oldest, *ages)
        if oldest == schedule.reach:
            break
    return oldest
