"""How a recipe's samplers and trainer go together, and what of it the reference model leaves out.

The model has a clock, samplers and a batch of its own, and its ``max_staleness`` is a cap that its
clock may not reach. The trainer's is more: where completions take no time, each rollout is exactly
so old (`asynchrony.schedule`).
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_qrl.asynchrony.settings import Asynchrony
from lightning_qrl.build import Run
from lightning_qrl.data import RolloutData
from lightning_qrl.simulator.words import plain

TAKEN = ("engine", "max_staleness")


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What decides who trains on what.

    Attributes:
        asynchrony: the knobs.
        groups: prompts of a rollout, over all ranks.
        group_size: completions of a prompt.
        updates: optimizer steps on a rollout.
        steps: optimizer steps of the run.
    """

    asynchrony: Asynchrony
    groups: int
    group_size: int
    updates: int
    steps: int

    @classmethod
    def of(cls, run: Run, data: RolloutData) -> "Rollouts":
        """Those of a run."""
        return cls(
            data.asynchrony, data.prompts_per_rollout, data.group_size, data.updates_per_rollout,
            run.trainer_args["max_steps"],
        )  # fmt: skip

    @property
    def lag(self) -> int | None:
        """Versions that each rollout is behind in the end; None where it varies, or is 0."""
        knobs, reach = self.asynchrony, self.asynchrony.max_staleness // self.updates
        constant = knobs.completion_time == 0 and knobs.weight_sync_every == 1
        full = knobs.depth(self.updates) == reach > 0
        return reach * self.updates if constant and full else None


def notes_on_rollouts(
    name: str, rollouts: Rollouts, section: Mapping[str, Any], engine: object
) -> Iterator[str]:
    """What the model does not take over.

    Args:
        name: of the recipe.
        rollouts: those of the recipe.
        section: ``rollout`` of the recipe.
        engine: that samples.
    """
    if rollouts.lag is not None:
        yield (
            f"the recipe's lag is {rollouts.lag} versions, for every rollout from step "
            f"{rollouts.lag} on; the model's max_staleness is a cap, and its own clock decides how "
            "much of it is used"
        )
    yield (
        f"not taken over: grpo.prompts_per_rollout={rollouts.groups} and "
        f"grpo.group_size={rollouts.group_size}; batch and samplers are the model's own"
    )
    knobs = {field.name: field.default for field in fields(Asynchrony)}
    defaults = knobs | _defaults(type(engine))
    given = asdict(rollouts.asynchrony) | {k: v for k, v in section.items() if k not in knobs}
    left = [key for key in given if key not in TAKEN and given[key] != defaults.get(key)]
    if left:
        said = ", ".join(f"rollout.{key}={plain(given[key])}" for key in left)
        of_clock = any(key in knobs for key in left)
        more = f"; qrl simulate --cluster --recipe {name} has the trainer's clock"
        yield f"not taken over: {said}{more if of_clock else ''}"


def _defaults(engine: type) -> dict[str, Any]:
    return {key: value.default for key, value in inspect.signature(engine).parameters.items()}
