"""The trainer's side: phases of training, versions, and weights on their way to the samplers."""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from lightning_qrl.simulator.cluster.clock import SECOND, Clock
from lightning_qrl.simulator.cluster.settings import Cluster
from lightning_qrl.simulator.cluster.work import Group, Syncs


@dataclass(slots=True)
class Training:
    """A phase of training; times in nanoseconds.

    Attributes:
        begin: when it began.
        shares: time of each trainer.
        version: of the weights it began with.
        first_ages: groups by the age of their first token.
        ages: of each group, the mean over its tokens.
        tokens: it trains on.
        waiting: groups in the queue when it began, its own among them.
        discarded: groups since the last one began.
        waited: time that the trainer waited for groups.
        ended: by the end of the window.
    """

    begin: int
    shares: list[int]
    version: int
    first_ages: Counter[int]
    ages: list[float]
    tokens: int
    waiting: int
    discarded: int
    waited: int
    ended: bool = False


class Trainer:
    """Trains when it is given a batch, and sends the weights.

    Args:
        cluster: what was set.
        clock: the time.
        changed: is called when a phase or a sync has ended.

    Attributes:
        version: optimizer steps so far.
        free: whether a phase may begin.
        sending: whether weights are on their way.
        syncs: when samplers got which version.
        phases: in order.
        token_ages: tokens that were trained on, by age.
        blocked: time that it waited for weights to be sent.
    """

    def __init__(self, cluster: Cluster, clock: Clock, changed: Callable[[], None]) -> None:
        self._cluster, self._clock, self._changed = cluster, clock, changed
        self.version, self.free, self.sending = 0, True, False
        self.syncs = Syncs()
        self.phases: list[Training] = []
        self.token_ages: Counter[int] = Counter()
        self.blocked, self._blocked_since = 0, -1
        self._free_since = self._due = 0
        self._sync_time = round(cluster.weights.seconds * SECOND)
        self._taken = clock.event()
        clock.process(self._live())

    def begin(self, batch: Sequence[Group], waiting: int, discarded: int) -> None:
        """Begin a phase.

        Args:
            batch: it trains on.
            waiting: groups in the queue, these among them.
            discarded: groups since the last phase began.
        """
        for group in batch:
            for version, tokens in group.spans.items():
                self.token_ages[self.version - version] += tokens
        tokens_of = [tokens for group in batch for tokens in group.tokens]
        now = self._clock.now
        self.phases.append(
            Training(
                begin=now,
                shares=self._shares(tokens_of),
                version=self.version,
                first_ages=Counter(self.version - group.version for group in batch),
                ages=[self.version - group.mean_version() for group in batch],
                tokens=sum(tokens_of),
                waiting=waiting,
                discarded=discarded,
                waited=now - self._free_since,
            )
        )
        self.free = False
        self._taken.succeed(max(self.phases[-1].shares))

    def close(self) -> None:
        """The window ends."""
        if self._blocked_since >= 0:
            self.blocked += self._clock.now - self._blocked_since
            self._blocked_since = -1

    def _shares(self, tokens_of: Sequence[int]) -> list[int]:
        """Time of each trainer: completions are dealt in the order in which they were begun."""
        trainers = self._cluster.trainers
        least, pace = self._cluster.updates * trainers.overhead, 1 / trainers.tokens_per_second
        return [
            max(1, round((least + pace * sum(tokens_of[number :: trainers.count])) * SECOND))
            for number in range(trainers.count)
        ]

    def _live(self) -> Generator[simpy.Event, Any, None]:
        while True:
            duration = yield self._taken
            yield self._clock.timeout(duration)
            self._taken = self._clock.event()
            self.version += self._cluster.updates
            self.phases[-1].ended = True
            self._changed()
            if len(self.phases) % self._cluster.weight_sync_every == 0:
                self._due = self.version
                yield from self._share_weights()
            self.free, self._free_since = True, self._clock.now
            self._changed()

    def _share_weights(self) -> Generator[simpy.Event, Any, None]:
        if self.sending:
            return  # these follow those that are on their way
        self.sending = True
        sent = self._clock.process(self._send())
        if self._cluster.weights.blocks_trainer:
            self._blocked_since = self._clock.now
            yield sent
            self.close()

    def _send(self) -> Generator[simpy.Event, Any, None]:
        """Until the samplers have the weights that are due."""
        while self.syncs.versions[-1] < self._due:
            version = self._due
            yield self._clock.timeout(self._sync_time)
            self.syncs.times.append(self._clock.now)
            self.syncs.versions.append(version)
        self.sending = False
        self._changed()
