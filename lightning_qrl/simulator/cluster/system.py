"""Samplers, queue and trainers as a discrete-event system, on SimPy.

* A free slot takes the next completion of the group that is being dealt, or begins a group if it
  may: while the queue is not full, and of a synchronous cluster while the trainer waits for it.
* A group whose last completion is finished goes into the queue. The trainer takes the batch that
  waits longest as soon as it is there; groups that are too old by then are discarded. A phase lasts
  as long as its slowest trainer's share.
* After every ``weight_sync_every``-th phase the weights are sent. One sync is under way at a time;
  when it ends with newer weights due, these follow. Samplers go on meanwhile, and then have the new
  version for the completions they begin, or for their next token (``in_flight_update``).

At one time, in this order: phases, syncs and completions end, a phase begins, what is too much for
the queue is dropped, completions begin. `asynchrony.schedule` has the same order, and this model
reproduces its every phase where both describe the same.

There is one event for a completion, and none for a token, nor for a sampler at a sync: which
version sampled which token follows from the times of the syncs, which a completion looks through at
its end. Where a sync costs reading time, it finds out then that it has to go on for longer. So work
grows with completions, and with slots times syncs where weights change in mid-flight.

Deviations from real clusters: a slot is as fast whatever the others do; samplers go on while they
load weights; prompts cost nothing to read, nor to read again with a prefix; lengths do not change
as the policy does.
"""

from collections import deque
from typing import Any

from simpy.events import Timeout

from lightning_qrl.simulator.cluster.clock import SECOND, Clock
from lightning_qrl.simulator.cluster.lengths import Stream
from lightning_qrl.simulator.cluster.outcome import Stopped
from lightning_qrl.simulator.cluster.settings import Cluster
from lightning_qrl.simulator.cluster.station import Station
from lightning_qrl.simulator.cluster.trainer import Trainer
from lightning_qrl.simulator.cluster.work import Completion, Group

COMPLETIONS = 10_000_000  # that are begun at most: some minutes of work


class System:
    """A cluster at work; `run` once, then read.

    Attributes:
        now: the end of the window, in nanoseconds.
        stopped: by what: duration, steps, or completions, the most that are begun.
        trainer: its phases, its time.
        flight: groups that are begun and not finished.
        waiting: groups in the queue.
        queue: these, the one that waits longest first.
        groups: those in flight.
        running: completions at work.
        busy: time of slots at finished completions, by pool.
        reading: of that, time in which prefixes were read again.
        sampled: tokens of finished completions.
        discarded: groups.
        discarded_tokens: of these.
        reread: nanoseconds in which a token is read again, by pool.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self._clock = cluster, Clock()
        self.now = 0
        self.stopped: Stopped | None = None
        self.flight, self.waiting = Station(), Station()
        self.queue: list[Group] = []
        self.groups: set[Group] = set()
        self.running: set[Completion] = set()
        self.busy, self.reading = [0] * len(cluster.samplers), [0] * len(cluster.samplers)
        self.sampled = self.discarded = self.discarded_tokens = 0
        self.trainer = Trainer(cluster, self._clock, self._trainer_changed)
        self._lengths = Stream(cluster.lengths, cluster.seed)
        pools = cluster.samplers
        self._pace = [SECOND / pool.tokens_per_second for pool in pools]  # ns of a token
        self.reread = [SECOND / pool.prefill_tokens_per_second for pool in pools]
        self._idle = deque(n for n, pool in enumerate(pools) for _ in range(pool.slots))
        self._dealt: Group | None = None  # the group that is being dealt, and what is left of it
        self._undealt = self._begun = 0
        self._judged = self._dropped = 0  # queue[:judged] is young enough for the next phase
        self._settling = False
        self._done = self._clock.event()

    def run(self) -> None:
        """Let time pass until the end."""
        if self.cluster.duration is not None:
            end = self._clock.timeout(round(self.cluster.duration * SECOND))
            end.callbacks.append(lambda _: self._stop("duration"))
        self._later()
        self._clock.run_until(self._done)
        self.now = self._clock.now
        self.trainer.close()
        self.flight.close(self.now, (group.start for group in self.groups))
        self.waiting.close(self.now, (group.end for group in self.queue))

    def _stop(self, why: Stopped) -> None:
        if not self._done.triggered:
            self.stopped = why
            self._done.succeed()

    def _trainer_changed(self) -> None:
        if self.cluster.steps is not None and self.trainer.version >= self.cluster.steps:
            self._stop("steps")
        self._later()

    def _later(self) -> None:
        """Settle when all else of this time has happened."""
        if not self._settling:
            self._settling = True
            self._clock.at_last(self._settle)

    def _settle(self, _: Any = None) -> None:
        self._settling = False
        if self.trainer.free:
            self._discard()
            if len(self.queue) >= self.cluster.batch:
                self._begin_phase()
        if self.cluster.when_full == "drop_oldest":
            while len(self.queue) > self.cluster.limit:  # so the trainer is at work, none is judged
                self._drop(self.queue.pop(0))
        now = self._clock.now
        while self._idle and (self._undealt or self._may_begin()):
            if not self._begin_completion(now):
                self._later()  # it takes no time: what it changes comes before the next
                break

    def _may_begin(self) -> bool:
        """Whether a group may be begun."""
        if self._begun >= COMPLETIONS:
            self._stop("completions")
            return False
        cluster = self.cluster
        if cluster.max_staleness == 0:
            at_hand = len(self.queue) + len(self.groups)
            return self.trainer.free and not self.trainer.sending and at_hand < cluster.batch
        return cluster.when_full == "drop_oldest" or len(self.queue) < cluster.limit

    def _begin_completion(self, now: int) -> bool:
        """Whether it takes time."""
        syncs = self.trainer.syncs
        if not self._undealt:
            self._undealt = self.cluster.group_size
            self._dealt = Group(now, syncs.versions[-1], self._undealt)
            self.groups.add(self._dealt)
            self.flight.enter(now)
        assert self._dealt is not None
        self._undealt -= 1
        self._begun += 1
        pool, tokens = self._idle.popleft(), self._lengths.next()
        pace = self._pace[pool]
        work = max(1, round(tokens * pace)) if pace else 0
        completion = Completion(self._dealt, pool, tokens, now, work, len(syncs.times), now)
        self.running.add(completion)
        self._dealt.tokens.append(tokens)
        Timeout(self._clock, work, completion).callbacks.append(self._end_completion)
        return work > 0

    def _end_completion(self, event: Any) -> None:
        done: Completion = event.value
        now, group, syncs = self._clock.now, done.group, self.trainer.syncs
        spans = group.spans
        if self.cluster.in_flight_update and done.seen < len(syncs.times):
            done.change_weights(syncs, now, self.reread[done.pool])
            if done.end > now:
                Timeout(self._clock, done.end - now, done).callbacks.append(self._end_completion)
                return
        for version, tokens in done.spans:
            spans[version] = spans.get(version, 0) + tokens
        if done.tokens > done.begun:
            version = syncs.versions[done.seen - 1]
            spans[version] = spans.get(version, 0) + done.tokens - done.begun
        self.running.remove(done)
        self.busy[done.pool] += now - done.start
        self.reading[done.pool] += now - done.start - done.work
        self.sampled += done.tokens
        self._idle.append(done.pool)
        group.unfinished -= 1
        if not group.unfinished:
            self._end_group(group, now)
        if self._clock.peek() > now:
            self._settle()
        else:
            self._later()

    def _end_group(self, group: Group, now: int) -> None:
        group.end = now
        self.groups.remove(group)
        self.flight.leave(now, group.start)
        self.queue.append(group)
        self.waiting.enter(now)

    def _drop(self, group: Group) -> None:
        self.waiting.leave(self._clock.now, group.end)
        self.discarded += 1
        self._dropped += 1
        self.discarded_tokens += sum(group.tokens)

    def _discard(self) -> None:
        """What is too old for a phase that would begin now."""
        cap, version = self.cluster.max_staleness, self.trainer.version
        if cap is None or version <= cap:
            return
        kept = []
        for group in self.queue[self._judged :]:
            if version - group.version <= cap:
                kept.append(group)
            else:
                self._drop(group)
        self.queue[self._judged :] = kept
        self._judged = len(self.queue)

    def _begin_phase(self) -> None:
        waiting, batch = len(self.queue), self.queue[: self.cluster.batch]
        del self.queue[: self.cluster.batch]
        for group in batch:
            self.waiting.leave(self._clock.now, group.end)
        self.trainer.begin(batch, waiting, self._dropped)
        self._judged = self._dropped = 0
