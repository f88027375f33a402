"""Prompts, and rollout phases as a Lightning data module: one epoch is one phase.

The loader is made anew each epoch, just when Lightning asks for it, so a phase is sampled with the
weights that the last update left: a synchronous run has staleness 0. (An endless loader would be
read one batch ahead, which makes every rollout one step stale.)

Prompts come in an order shuffled for each pass over the split. The position in it follows from the
number of optimizer steps, so a resumed run skips and repeats nothing. Dynamic sampling takes its
spare prompts from anywhere in the split, by a draw of the phase's own, so they move no position.

With ``max_staleness`` above 0 a phase trains on what earlier weights have sampled (`asynchrony`);
what waits for its phase is in the checkpoint.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_qrl.advantages import highest
from lightning_qrl.advantages import leverage as leverage_of
from lightning_qrl.asynchrony.pipeline import Pipeline, check_queue
from lightning_qrl.asynchrony.schedule import Schedule
from lightning_qrl.asynchrony.settings import Asynchrony
from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience, split_for_updates
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.regime import Regime
from lightning_qrl.seeding import derive_seed
from lightning_qrl.tasks.base import Prompt

MOST_COMPLETIONS = 2**24  # of a rollout; each takes a kilobyte and more


class RolloutData(L.LightningDataModule):
    """Rollout phases of a `GRPOModule`.

    Args:
        prompts: the training split.
        group_size: completions of each prompt.
        prompts_per_rollout: prompts of a phase, over all ranks.
        minibatches: optimizer steps in one pass over a rollout.
        num_iterations: passes over a rollout.
        micro_batches: parts that each optimizer step is accumulated from.
        dynamic_sampling: how often groups whose rewards are all equal are replaced by groups of
            other prompts; 0 keeps them.
        leverage: share of all leverage (see `advantages.leverage`) that is trained on: the smallest
            set of completions that holds it; 1 trains on all.
        asynchrony: how far sampling runs ahead of training; by default not at all.
        seed: decides the order of prompts, the shuffling of completions, and how long they take.

    Raises:
        ValueError: the numbers do not divide, or the split holds too few prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        prompts_per_rollout: int = 16,
        minibatches: int = 1,
        num_iterations: int = 1,
        micro_batches: int = 1,
        dynamic_sampling: int = 0,
        leverage: float = 1.0,
        asynchrony: Asynchrony = Asynchrony(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("prompts_per_rollout", prompts_per_rollout),
            ("minibatches", minibatches),
            ("num_iterations", num_iterations),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        completions = prompts_per_rollout * group_size
        if completions > MOST_COMPLETIONS:
            raise ValueError(
                f"{completions} completions a rollout (prompts_per_rollout x group_size) are more "
                f"than {MOST_COMPLETIONS}, which no machine holds"
            )
        if completions % (minibatches * micro_batches):
            raise ValueError(
                f"{completions} completions (prompts_per_rollout x group_size) do not divide into "
                f"minibatches={minibatches} x accumulate_grad_batches={micro_batches} equal parts"
            )
        if prompts_per_rollout > len(prompts):
            raise ValueError(
                f"prompts_per_rollout={prompts_per_rollout}, but the task has only "
                f"{len(prompts)} prompts"
            )
        if dynamic_sampling < 0:
            raise ValueError(f"dynamic_sampling must be at least 0, got {dynamic_sampling}")
        if dynamic_sampling and asynchrony.max_staleness:
            raise ValueError(
                f"dynamic_sampling={dynamic_sampling} samples anew when a rollout is judged, which "
                "with rollout.max_staleness above 0 is long after it was sampled; set either to 0"
            )
        if not 0 < leverage <= 1:
            raise ValueError(f"leverage must be above 0 and at most 1, got {leverage}")
        self.prompts = prompts
        self.dynamic_sampling = dynamic_sampling
        self.leverage = leverage
        self.group_size = group_size
        self.prompts_per_rollout = prompts_per_rollout
        self.minibatches = minibatches
        self.num_iterations = num_iterations
        self.micro_batches = micro_batches
        self.asynchrony = asynchrony
        self.seed = seed
        self._pipeline: Pipeline | None = None
        self._restored: dict[str, Any] = {}

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps of one phase."""
        return self.minibatches * self.num_iterations

    def regime(self, ranks: int = 1) -> Regime:
        """How rollouts become updates on so many ranks."""
        updates, parts = self.updates_per_rollout, ranks * self.micro_batches
        whole = self.minibatches == 1 == self.leverage and self.prompts_per_rollout % parts == 0
        return Regime(updates, whole, self.asynchrony.max_staleness + updates - 1)

    @override
    def train_dataloader(self) -> DataLoader[Experience]:
        assert self.trainer is not None
        module = cast(GRPOModule, self.trainer.lightning_module)
        rank, world = self.trainer.global_rank, self.trainer.world_size
        self.check_ranks(world)
        phase, within = divmod(self.trainer.global_step, self.updates_per_rollout)
        if within:
            raise UserError(
                f"the checkpoint was written after {within} of {self.updates_per_rollout} updates "
                "on a rollout; resume from one written at the end of an epoch"
            )
        if self.asynchrony.max_staleness:
            pipeline = self._pipeline_at(phase, module)
            experience = module.collect(pipeline.prompts(phase), phase, (), pipeline)
        else:
            prompts = self.phase_prompts(phase)[rank::world]
            spares = (prompts[rank::world] for prompts in self.spare_prompts(phase))
            experience = module.collect(prompts, phase, spares)
        updates = self._updates(self._chosen(experience), phase)
        first_pass = [
            index.tensor_split(self.micro_batches) for index in updates[: self.minibatches]
        ]
        experience = module.anchored(experience, [part for parts in first_pass for part in parts])
        batches = split_for_updates(experience, updates, self.micro_batches, world)
        return DataLoader(cast("torch.utils.data.Dataset[Experience]", batches), batch_size=None)

    def _pipeline_at(self, phase: int, module: GRPOModule) -> Pipeline:
        """The pipeline; a new one where a run begins or goes on from a checkpoint."""
        if self._pipeline is None or phase == 0:
            assert self.trainer is not None
            rank, world = self.trainer.global_rank, self.trainer.world_size
            schedule = Schedule(
                self.asynchrony,
                groups=self.prompts_per_rollout // world,
                samplers=self._samplers // world,
                updates=self.updates_per_rollout,
                tokens=module.engine.max_new_tokens,
                seed=self.seed,
            )
            self._pipeline = Pipeline(
                schedule,
                self.group_size,
                lambda number: self.prompts[self._index(number * world + rank)],
            )
            if phase:
                check_queue(self._restored, self._filled_with(), world)
                self._pipeline.load_state_dict(self._restored["queues"][rank])
        return self._pipeline

    @override
    def state_dict(self) -> dict[str, Any]:
        """What waits in the queue of each rank; nothing of a synchronous run."""
        if self._pipeline is None:
            return {}
        assert self.trainer is not None
        queues: list[Any] = [self._pipeline.state_dict()] * self.trainer.world_size
        if self.trainer.world_size > 1:
            torch.distributed.all_gather_object(queues, queues[0])
        return {"filled_with": self._filled_with(), "queues": queues}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.trainer is not None
        self._pipeline, self._restored = None, state_dict
        check_queue(state_dict, self._filled_with(), self.trainer.world_size)

    def _filled_with(self) -> dict[str, Any]:
        assert self.trainer is not None
        module = cast(GRPOModule, self.trainer.lightning_module)
        head, routes = module.objective.corrections.head, module.replays_routes
        return self.queue_settings(module.engine.max_new_tokens, head, routes)

    def queue_settings(self, tokens: int, head: int, routes: bool) -> dict[str, Any]:
        """What the contents of the queue depend on, by the names that a user knows.

        Args:
            tokens: length limit of a completion.
            head: likeliest tokens that the sampler tells the log-probabilities of.
            routes: whether it tells the experts that tokens went to.
        """
        own = ("group_size", "prompts_per_rollout", "minibatches", "num_iterations", "seed")
        told = {"max_new_tokens": tokens, "score_centering.head": head, "router_replay": routes}
        return asdict(self.asynchrony) | {name: getattr(self, name) for name in own} | told

    def check_ranks(self, world: int) -> None:
        """Raise UserError where so many ranks could not have equal shares."""
        share = self.prompts_per_rollout // world * self.group_size
        if self.prompts_per_rollout % world or share % (self.minibatches * self.micro_batches):
            raise UserError(
                f"prompts_per_rollout={self.prompts_per_rollout} does not give {world} ranks "
                f"equal shares that divide into minibatches={self.minibatches} x "
                f"accumulate_grad_batches={self.micro_batches} equal parts"
            )
        if self._samplers % world:
            raise UserError(f"samplers={self._samplers} does not divide into {world} ranks")

    @property
    def _samplers(self) -> int:
        return self.asynchrony.samplers or self.prompts_per_rollout

    def phase_prompts(self, phase: int) -> list[Prompt]:
        """The prompts of a phase, over all ranks."""
        return [self.prompts[index] for index in self._phase_indices(phase)]

    def _phase_indices(self, phase: int) -> list[int]:
        start = phase * self.prompts_per_rollout
        positions = range(start, start + self.prompts_per_rollout)
        return [self._index(position) for position in positions]

    def _index(self, position: int) -> int:
        number, offset = divmod(position, len(self.prompts))
        return self._order(number)[offset]

    def spare_prompts(self, phase: int) -> list[list[Prompt]]:
        """For each attempt of dynamic sampling, other prompts, over all ranks; no prompt twice."""
        used, each = set(self._phase_indices(phase)), self.prompts_per_rollout
        draw = random.Random(derive_seed(self.seed, "spare prompts", phase))
        count = min(len(self.prompts), len(used) + self.dynamic_sampling * each)
        spare = [i for i in draw.sample(range(len(self.prompts)), count) if i not in used]
        parts = [spare[a * each : (a + 1) * each] for a in range(self.dynamic_sampling)]
        return [[self.prompts[i] for i in part] for part in parts]

    @lru_cache(maxsize=4)  # noqa: B019  (a data module lives as long as its run)
    def _order(self, number: int) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(derive_seed(self.seed, "prompts", number)).shuffle(order)
        return order

    def _chosen(self, experience: Experience) -> Tensor:
        """Indices of the completions to train on, ascending."""
        if self.leverage == 1:
            return torch.arange(len(experience))
        leverage_B = leverage_of(experience.rewards_B.view(-1, self.group_size)).flatten()
        return highest(leverage_B, self.leverage, self.minibatches * self.micro_batches)

    def _updates(self, chosen: Tensor, phase: int) -> list[Tensor]:
        """Indices of the completions of each optimizer step; in order when there is one a pass."""
        if self.minibatches == 1:
            return [chosen] * self.num_iterations
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "minibatches", phase))
        orders = [
            torch.randperm(len(chosen), generator=generator) for _ in range(self.num_iterations)
        ]
        return [chosen[part] for order in orders for part in order.tensor_split(self.minibatches)]
