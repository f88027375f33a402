"""Small parts of GRPO for tests: completions by hand, a module that keeps what it saw, its data."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_qrl.data import RolloutData
from lightning_qrl.experience import Completion, Experience, make_experience
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.rollouts.embedded import Embedded

G, P, NEW = 4, 3, 6  # completions of a prompt, prompts of a rollout, tokens of a completion


def completion(
    tokens: Sequence[int], prompt: Sequence[int] = (2, 3), truncated: bool = False
) -> Completion:
    """A completion that was sampled with log-probabilities of 0."""
    ids = torch.tensor(tokens)
    return Completion(tuple(prompt), ids, torch.zeros(len(ids)), torch.zeros_like(ids), truncated)


def experience_of(
    completions: Sequence[Completion], advantages: Sequence[float] | None = None, pad_id: int = 0
) -> Experience:
    """Completions as a batch."""
    zeros = torch.zeros(len(completions))
    given = zeros if advantages is None else torch.tensor(advantages)
    return make_experience(completions, zeros, given, pad_id)


def largest_ratio(logprobs_BS: Tensor, e: Experience) -> float:
    """The largest |ratio - 1| of a sampled token."""
    return float(((logprobs_BS - e.logprobs_BS).exp() - 1)[e.mask_BS].abs().max())


class Watched(GRPOModule):
    """Keeps each rollout, each micro-batch, and in float64 the weights that each was scored with.

    Attributes:
        rollouts: what was collected.
        seen: micro-batches with a copy of the model at that time; filled where ``copies`` is true.
    """

    copies = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rollouts: list[Experience] = []
        self.seen: list[tuple[Experience, Any]] = []

    def collect(self, *given: Any) -> Experience:
        self.rollouts.append(super().collect(*given))
        return self.rollouts[-1]

    def training_step(self, experience: Experience, batch_idx: int) -> Tensor:
        with torch.no_grad():
            model = copy.deepcopy(self.model).double() if self.copies else None
        self.seen.append((experience, model))
        return super().training_step(experience, batch_idx)


def module_of(
    policy: Policy, task: Any, cls: Callable[..., Watched] = Watched, **options: Any
) -> Watched:
    """A module with the embedded engine."""
    engine = Embedded(eos_id=policy.eos_id, pad_id=policy.pad_id, max_new_tokens=NEW)
    settings = AdamWSettings(lr=1e-2)
    parts = {"policy": policy, "task": task, "engine": engine, "optimizer": settings}
    return cls(**parts, group_size=G, **options)


def data_of(task: Any, **options: Any) -> RolloutData:
    """Its data."""
    numbers = {"group_size": G, "prompts_per_rollout": P, **options}
    return RolloutData(task.prompts("train"), **numbers)
