"""The knobs of asynchrony: keys of the recipe's section ``rollout``.

A version is the number of optimizer steps that made the weights. The unit of time is what one
optimizer step takes. ``max_staleness: 0`` is the synchronous trainer, for which no other of these
keys means anything; so it is refused.
"""

from dataclasses import dataclass, fields

ROLLOUTS = 1000  # that may wait, at most
LIMITS = {  # so that a schedule is tried in a second, and its clock counts what a float tells apart
    "queue_depth": (1, ROLLOUTS),
    "weight_sync_every": (1, ROLLOUTS),
    "samplers": (1, 10_000),
    "completion_time": (0, 1_000_000),
    "completion_time_spread": (0, 10),
}


@dataclass(frozen=True, kw_only=True)
class Asynchrony:
    """How far the samplers may run ahead of the trainer, and what they are like.

    Attributes:
        max_staleness: versions that a group's first token may be behind when its phase of training
            begins; an older group is discarded.
        queue_depth: rollouts of finished groups that may wait for the trainer; by default as many
            as make the lag constant when completions take no time.
        weight_sync_every: phases of training between two times that samplers get the weights.
        in_flight_update: samplers change weights in mid-completion; else with their next group.
        samplers: each works at one group at a time, over all ranks; by default as many as a rollout
            has prompts.
        completion_time: mean time of ``max_new_tokens`` tokens; 0 is instantly.
        completion_time_spread: coefficient of variation of that time, which is lognormal.

    Raises:
        ValueError: a value is out of range, or does nothing.
    """

    max_staleness: int = 0
    queue_depth: int | None = None
    weight_sync_every: int = 1
    in_flight_update: bool = False
    samplers: int | None = None
    completion_time: float = 0.0
    completion_time_spread: float = 0.0

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, got {self.max_staleness}")
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} must be at least {least} and at most {most}, got {value}")
        self._refuse_idle()

    def _refuse_idle(self) -> None:
        of_time = ("in_flight_update", "samplers", "completion_time_spread")
        for name in KEYS:
            if name == "max_staleness" or getattr(self, name) == _default(name):
                continue
            if not self.max_staleness:
                raise ValueError(
                    f"{name} does nothing with max_staleness=0, where sampler and trainer take "
                    "turns; take it out, or raise max_staleness"
                )
            if name in of_time and not self.completion_time:
                raise ValueError(
                    f"{name} does nothing with completion_time=0, where completions take no time; "
                    "take it out, or set completion_time"
                )

    def check(self, updates: int) -> None:
        """Raise ValueError where the trainer would wait for ever, or nothing could be stale.

        Args:
            updates: versions that one phase of training adds.
        """
        if self.max_staleness > ROLLOUTS * updates:
            raise ValueError(
                f"max_staleness={self.max_staleness} is more than {ROLLOUTS} rollouts of {updates} "
                f"updates; set it to at most {ROLLOUTS * updates}"
            )
        if 0 < self.max_staleness < updates:
            raise ValueError(
                f"max_staleness={self.max_staleness} is less than the {updates} updates on one "
                "rollout, so no rollout could be a phase behind; set it to 0 or at least "
                f"{updates}"
            )
        oldest = (self.weight_sync_every - 1) * updates
        if oldest > self.max_staleness:
            raise ValueError(
                f"weight_sync_every={self.weight_sync_every} leaves the samplers with weights that "
                f"are {oldest} versions old, more than max_staleness={self.max_staleness}; lower "
                "the one or raise the other"
            )

    def depth(self, updates: int) -> int:
        """Rollouts that may wait for the trainer."""
        given = self.queue_depth
        return self.max_staleness // updates if given is None else given


KEYS = tuple(field.name for field in fields(Asynchrony))


def _default(name: str) -> object:
    return Asynchrony.__dataclass_fields__[name].default
