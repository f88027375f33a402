"""What can be set in the model of a cluster, in real units: seconds, tokens, bytes, GPU-hours.

Names are those of the asynchronous trainer (`asynchrony.settings`) where they mean the same. A
version is the number of optimizer steps that made the weights; a phase of training takes one batch
and makes ``updates`` optimizer steps on it. The defaults are an example: an 8B policy in BF16 on
16 GPUs whose samplers make a little more than the trainers take.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_qrl.simulator.cluster.checks import built, check_flags, check_numbers, written
from lightning_qrl.simulator.cluster.lengths import Empirical, Lognormal
from lightning_qrl.simulator.cluster.parts import YEAR, Samplers, Trainers, WeightSync
from lightning_qrl.simulator.constants import POST, Learning

WhenFull = Literal["wait", "drop_oldest"]

RANGES = {
    "group_size": (1, 100_000),
    "batch": (1, 1_000_000),
    "updates": (1, 1000),
    "queue_depth": (1, 1_000_000),
    "max_staleness": (0, 1_000_000),
    "weight_sync_every": (1, 1_000_000),
    "duration": (1e-6, 10 * YEAR),
    "steps": (1, 10_000_000),
    "seed": (0, 2**63),
    "floor": (0, 1e3),
    "target_reward": (-1e9, 1e9),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Samplers, queue and trainers.

    Attributes:
        samplers: pools; the free slot that waits longest takes the next completion.
        trainers: data parallel.
        lengths: of completions, in tokens.
        group_size: completions of one prompt; a rollout is such a group, and is finished when its
            last completion is.
        batch: rollouts of a phase of training, first-in first.
        updates: optimizer steps of a phase.
        queue_depth: batches of finished rollouts that may wait; None: any number. It bounds when
            rollouts are begun: those under way are finished, and may come on top.
        when_full: with a full queue no rollout is begun; or samplers go on, and what is too much is
            dropped, first what waits longest.
        max_staleness: versions that a rollout's first token may be behind when its phase begins; an
            older one is discarded. None: any number. 0 is synchronous: no rollout is begun while
            the trainer works or weights are under way, nor more than the batch needs.
        weight_sync_every: phases between two times that the samplers get the weights.
        in_flight_update: completions go on with new weights; else they are finished with the old.
        weights: what a weight sync costs.
        duration: seconds; None: until ``steps``.
        steps: optimizer steps after which to stop (whole phases); None: at ``duration``.
        seed: of the lengths.
        learning: how mismatch acts on drift and reward.
        floor: mismatch that quantization alone makes, as mean |Δlogprob|.
        target_reward: asks what it costs to get there.

    Raises:
        ValueError: a value is impossible, or does nothing.
    """

    samplers: tuple[Samplers, ...] = (Samplers(),)
    trainers: Trainers = Trainers()
    lengths: Lognormal | Empirical = Lognormal()
    group_size: int = 16
    batch: int = 64
    updates: int = 1
    queue_depth: int | None = 1
    when_full: WhenFull = "wait"
    max_staleness: int | None = 2
    weight_sync_every: int = 1
    in_flight_update: bool = False
    weights: WeightSync = WeightSync()
    duration: float | None = 3600.0
    steps: int | None = None
    seed: int = 0
    learning: Learning = POST.learning
    floor: float = POST.floors.precision["bf16"]
    target_reward: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, RANGES)
        _check_learning(self.learning)
        check_flags(self, "in_flight_update")
        if self.when_full not in get_args(WhenFull):
            raise ValueError(
                f"when_full is {' or '.join(get_args(WhenFull))}, got {written(self.when_full)}"
            )
        if not self.samplers:
            raise ValueError("samplers is empty; give at least one pool")
        if self.duration is None and self.steps is None:
            raise ValueError("steps or duration must be set, or the run never ends")
        self._refuse_the_impossible()
        self._refuse_idle()

    def _refuse_the_impossible(self) -> None:
        completions = self.batch * self.group_size
        if self.trainers.count > completions:
            raise ValueError(
                f"trainers.count={self.trainers.count} is more than the {completions} completions "
                "of a batch; lower it, or raise batch or group_size"
            )
        oldest = (self.weight_sync_every - 1) * self.updates
        cap = self.max_staleness
        if cap is not None and oldest > cap:
            raise ValueError(
                f"weight_sync_every={self.weight_sync_every} leaves the samplers with weights that "
                f"are up to {oldest} behind, more than max_staleness={cap}; lower the one or raise "
                "the other"
            )
        if cap is not None and 0 < cap < self.updates:
            raise ValueError(
                f"max_staleness={cap} is less than the {self.updates} updates on one batch, so no "
                f"rollout could be a phase behind; set it to 0 or at least {self.updates}"
            )
        at_once = any(math.isinf(pool.tokens_per_second) for pool in self.samplers)
        endless = self.queue_depth is None or self.when_full == "drop_oldest"
        if at_once and endless and cap != 0:
            raise ValueError(
                "samplers.tokens_per_second=inf makes rollouts without end; bound the queue "
                "(queue_depth, when_full=wait), or give the speed"
            )

    def _refuse_idle(self) -> None:
        if self.when_full == "drop_oldest" and self.queue_depth is None:
            raise ValueError("when_full=drop_oldest does nothing without queue_depth; set it")
        if not self.in_flight_update and any(
            pool.prefill_tokens_per_second != math.inf for pool in self.samplers
        ):
            raise ValueError(
                "samplers.prefill_tokens_per_second does nothing without in_flight_update, where "
                "no prefix is read again; take it out, or set in_flight_update"
            )

    @property
    def limit(self) -> float:
        """Rollouts in the queue at which it is full."""
        return math.inf if self.queue_depth is None else self.queue_depth * self.batch

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Cluster":
        """A cluster of plain values, as YAML has them.

        ``samplers`` is one pool or a list of pools; ``lengths`` has ``mean``, ``spread`` and
        ``limit``, or ``values``, or the ``file`` that holds these.

        Raises:
            ValueError: in one line, with the key and what to do.
        """
        made = dict(values)
        pools = made.get("samplers", cls.samplers)
        if isinstance(pools, list | tuple):
            made["samplers"] = tuple(
                built(Samplers, pool, f"samplers.{number}") for number, pool in enumerate(pools)
            )
        else:
            made["samplers"] = (built(Samplers, pools, "samplers"),)
        parts = {"trainers": Trainers, "weights": WeightSync, "learning": Learning}
        for key in parts.keys() & made.keys():
            made[key] = built(parts[key], made[key], key)
        if "lengths" in made:
            made["lengths"] = _lengths(made["lengths"])
        cluster: Cluster = built(cls, made)
        return cluster

    def to_mapping(self) -> dict[str, Any]:
        """All settings as plain values of which `from_mapping` makes this cluster."""
        made = asdict(self)
        pools = made["samplers"]
        plain: dict[str, Any] = _plain({**made, "samplers": pools[0] if len(pools) == 1 else pools})
        return plain


def _check_learning(learning: Learning) -> None:
    ranges = {field.name: (0.0, 1e9) for field in fields(Learning)}
    ranges |= dict.fromkeys(("reward_start", "reward_ceiling", "reward_least"), (-1e9, 1e9))
    ranges |= {"half": (1e-12, 1e9), "mismatch_limit": (1e-12, math.inf)}
    try:
        check_numbers(learning, ranges)
    except ValueError as error:
        raise ValueError(f"learning.{error}") from None


def _plain(value: Any) -> Any:
    """For JSON, which has no infinity and no tuples."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return "inf" if value == math.inf else value


def _lengths(values: Any) -> Any:
    if isinstance(values, Mapping) and "file" in values:
        if len(values) > 1:
            raise ValueError("lengths.file stands alone; take the other keys of lengths out")
        return Empirical.read(Path(str(values["file"])))
    if isinstance(values, Mapping) and "values" in values:
        given = values["values"]
        values = {**values, "values": tuple(given) if isinstance(given, list) else given}
        return built(Empirical, values, "lengths")
    return built(Lognormal, values, "lengths")
