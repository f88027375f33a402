"""What samplers work at: completions, and the groups of them that are the queue's rollouts.

Time is in nanoseconds.
"""

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Group:
    """A rollout: the completions of one prompt.

    Attributes:
        start: of its first completion.
        version: of the weights that its first token was sampled with.
        unfinished: completions that are not finished, begun or not.
        end: of its last completion.
        tokens: of each completion that was begun, in that order.
        spans: tokens that each version sampled.
    """

    start: int
    version: int
    unfinished: int
    end: int = -1
    tokens: list[int] = field(default_factory=list)
    spans: dict[int, int] = field(default_factory=dict)

    def mean_version(self) -> float:
        """Over its tokens."""
        return sum(v * tokens for v, tokens in self.spans.items()) / sum(self.spans.values())


@dataclass(frozen=True, slots=True)
class Syncs:
    """When the samplers got which version; the first is at 0.

    Attributes:
        times: in order.
        versions: as many.
    """

    times: list[int] = field(default_factory=lambda: [0])
    versions: list[int] = field(default_factory=lambda: [0])


@dataclass(slots=True, eq=False)
class Completion:
    """A completion at work.

    Attributes:
        group: it belongs to.
        pool: number of the pool that samples it.
        tokens: it will have.
        start: when it was begun.
        work: time that its tokens take.
        seen: weight syncs that it knows of.
        at: it samples from then on; before, it read its tokens again.
        done: time that it had sampled for before ``at``.
        begun: tokens that were begun in that time.
        spans: pairs of an older version and the tokens that it sampled.
    """

    group: Group
    pool: int
    tokens: int
    start: int
    work: int
    seen: int
    at: int
    done: int = 0
    begun: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)

    def change_weights(self, syncs: Syncs, now: int, reading: float) -> None:
        """Take every version that came before ``now``, in mid-flight.

        At a sync its tokens are read again, and it goes on when that is done; another sync
        meanwhile makes it start over with the reading. A token that was begun before a sync is the
        old version's.

        Args:
            syncs: all before ``now``, which is not after its end.
            now: the time.
            reading: nanoseconds in which one token is read again.
        """
        last = bisect_left(syncs.times, now, self.seen)
        for place in range(self.seen, last):
            time = syncs.times[place]
            if time > self.at:
                self.done += time - self.at
                begun = -(-self.done * self.tokens // self.work)  # rounded up
                if begun > self.begun:
                    self.spans.append((syncs.versions[place - 1], begun - self.begun))
                    self.begun = begun
            self.at = time + round(self.begun * reading)
        self.seen = last

    @property
    def end(self) -> int:
        """When it ends if no other sync comes."""
        return self.at + self.work - self.done

    def sampled(self, now: int) -> int:
        """Whole tokens; call after `change_weights`."""
        done = self.done + max(0, now - self.at)
        return min(self.tokens, done * self.tokens // self.work) if self.work else 0
