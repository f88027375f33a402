"""Prompts, and rollout phases as a Lightning data module: one epoch is one phase.

The loader is made anew each epoch, just when Lightning asks for it, so a phase is sampled with the
weights that the last update left: a synchronous run has staleness 0. (An endless loader would be
read one batch ahead, which makes every rollout one step stale.)

Prompts come in an order shuffled for each pass over the split. The position in it follows from the
number of optimizer steps, so a resumed run skips and repeats nothing.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience, split_for_updates
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.seeding import derive_seed
from lightning_qrl.tasks.base import Prompt


class RolloutData(L.LightningDataModule):
    """Rollout phases of a `GRPOModule`.

    Args:
        prompts: the training split.
        group_size: completions of each prompt.
        prompts_per_rollout: prompts of a phase, over all ranks.
        minibatches: optimizer steps in one pass over a rollout.
        num_iterations: passes over a rollout.
        micro_batches: parts that each optimizer step is accumulated from.
        seed: decides the order of prompts and the shuffling of completions.

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
        self.prompts = prompts
        self.group_size = group_size
        self.prompts_per_rollout = prompts_per_rollout
        self.minibatches = minibatches
        self.num_iterations = num_iterations
        self.micro_batches = micro_batches
        self.seed = seed

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps of one phase."""
        return self.minibatches * self.num_iterations

    @override
    def train_dataloader(self) -> DataLoader[Experience]:
        assert self.trainer is not None
        module = cast(GRPOModule, self.trainer.lightning_module)
        rank, world = self.trainer.global_rank, self.trainer.world_size
        self._check_ranks(world)
        phase, within = divmod(self.trainer.global_step, self.updates_per_rollout)
        if within:
            raise UserError(
                f"the checkpoint was written after {within} of {self.updates_per_rollout} updates "
                "on a rollout; resume from one written at the end of an epoch"
            )
        prompts = self.phase_prompts(phase)[rank::world]
        experience = module.collect(prompts, phase)
        updates = self._updates(len(experience), phase)
        batches = split_for_updates(experience, updates, self.micro_batches, world)
        return DataLoader(cast("torch.utils.data.Dataset[Experience]", batches), batch_size=None)

    def _check_ranks(self, world: int) -> None:
        share = self.prompts_per_rollout // world * self.group_size
        if self.prompts_per_rollout % world or share % (self.minibatches * self.micro_batches):
            raise UserError(
                f"prompts_per_rollout={self.prompts_per_rollout} does not give {world} ranks "
                f"equal shares that divide into minibatches={self.minibatches} x "
                f"accumulate_grad_batches={self.micro_batches} equal parts"
            )

    def phase_prompts(self, phase: int) -> list[Prompt]:
        """The prompts of a phase, over all ranks."""
        start = phase * self.prompts_per_rollout
        positions = range(start, start + self.prompts_per_rollout)
        passes = (divmod(position, len(self.prompts)) for position in positions)
        return [self.prompts[self._order(number)[offset]] for number, offset in passes]

    @lru_cache(maxsize=2)  # noqa: B019  (a data module lives as long as its run)
    def _order(self, number: int) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(derive_seed(self.seed, "prompts", number)).shuffle(order)
        return order

    def _updates(self, completions: int, phase: int) -> list[Tensor]:
        """Indices of the completions of each optimizer step; in order when there is one a pass."""
        if self.minibatches == 1:
            return [torch.arange(completions)] * self.num_iterations
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "minibatches", phase))
        passes = [
            torch.randperm(completions, generator=generator) for _ in range(self.num_iterations)
        ]
        return [part for order in passes for part in order.chunk(self.minibatches)]
