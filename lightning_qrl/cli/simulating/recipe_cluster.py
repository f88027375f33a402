"""`qrl simulate --cluster --recipe`: a recipe's samplers and trainer, on the trainer's own clock.

The clock counts optimizer steps: one is shown as a second. Nothing is known of GPUs.
"""

from dataclasses import asdict
from typing import Any

from lightning_qrl.cli.quiet import quiet_imports

UNIT = "the unit of time is one optimizer step, shown as a second; a recipe says nothing of GPUs"


def recipe_cluster(name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values of a cluster that does what the recipe's trainer does, and notes on them.

    Args:
        name: of the recipe, or its path.

    Raises:
        UserError: there is no such recipe, something is wrong with it, or it has no rollouts.
    """
    from lightning_qrl.cli.simulating.base import check_before_building
    from lightning_qrl.simulator.cluster import from_asynchrony
    from lightning_qrl.simulator.dynamics import floor
    from lightning_qrl.simulator.settings import Settings

    check_before_building(name, {}, {})
    with quiet_imports():
        from lightning_qrl.launch.simulated import read_recipe

    reading = read_recipe(name)
    rollouts = reading.rollouts
    cluster = from_asynchrony(
        groups=rollouts.groups,
        phases=-(-rollouts.steps // rollouts.updates),
        updates=rollouts.updates,
        **asdict(rollouts.asynchrony),
    )
    notes = [UNIT]
    if rollouts.lag is not None and rollouts.asynchrony.queue_depth is None:
        notes.append(
            f"queue_depth={cluster.queue_depth} follows from max_staleness={cluster.max_staleness} "
            "and makes the lag constant; change the one with the other"
        )
    values = asdict(cluster)
    (values["samplers"],) = values["samplers"]
    if reading.unknown:
        reasons = " and ".join(dict.fromkeys(reading.unknown.values()))
        notes.append(f"the floor is BF16's, as {reasons}; give the floor to take for it")
    else:
        values["floor"] = floor(Settings(**reading.values))
    return values, tuple(notes)
