"""The asynchronous trainer of this project as a cluster, so that its runs can be predicted.

Its clock counts optimizer steps: one takes one second here. A sampler works at a whole group at a
time, so a completion stands for a group, and its length for the time it takes: a million tokens are
``completion_time``. Weights are sent in no time. `asynchrony.schedule` is the model that the
trainer itself runs on; the two agree phase by phase.
"""

import math

from lightning_qrl.simulator.cluster.lengths import Lognormal
from lightning_qrl.simulator.cluster.parts import Samplers, Trainers, WeightSync
from lightning_qrl.simulator.cluster.settings import Cluster

TOKENS = 1_000_000  # of a completion that takes the mean time


def from_asynchrony(
    *,
    groups: int,
    phases: int,
    max_staleness: int,
    queue_depth: int | None = None,
    weight_sync_every: int = 1,
    in_flight_update: bool = False,
    samplers: int | None = None,
    completion_time: float = 0.0,
    completion_time_spread: float = 0.0,
    updates: int = 1,
    seed: int = 0,
) -> Cluster:
    """A cluster that does what the asynchronous trainer does.

    Args:
        groups: prompts of a rollout phase, over all ranks.
        phases: of training, after which to stop.
        max_staleness: knob of the same name, as all up to ``completion_time_spread``.
        queue_depth: by default as many as make the lag constant.
        weight_sync_every: phases between two syncs.
        in_flight_update: completions take new weights at once.
        samplers: by default as many as ``groups``.
        completion_time: mean, in optimizer steps; 0 is instantly.
        completion_time_spread: coefficient of variation.
        updates: optimizer steps of a phase.
        seed: of the completion times.

    Raises:
        ValueError: the knobs contradict one another.
    """
    speed = TOKENS / completion_time if completion_time else math.inf
    depth = max(1, max_staleness // updates) if queue_depth is None else queue_depth
    return Cluster(
        samplers=(Samplers(slots=samplers or groups, tokens_per_second=speed, gpus=0),),
        trainers=Trainers(count=1, tokens_per_second=math.inf, overhead=1.0, gpus=0),
        lengths=Lognormal(mean=TOKENS, spread=completion_time_spread, limit=1000 * TOKENS),
        group_size=1,
        batch=groups,
        updates=updates,
        queue_depth=depth,
        max_staleness=max_staleness,
        weight_sync_every=weight_sync_every,
        in_flight_update=in_flight_update,
        weights=WeightSync(parameters=0, latency=0, bandwidth=math.inf, blocks_trainer=False),
        duration=None,
        steps=phases * updates,
        seed=seed,
    )
