"""Judged completions by their prompts: what a rollout is before advantages are made of it.

P prompts, G completions of each, B = P G.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_qrl.advantages import zero_variance
from lightning_qrl.experience import Completion
from lightning_qrl.metrics import Metric, deviation, largest, mean, smallest


@dataclass(frozen=True, slots=True)
class Groups:
    """Completions and their rewards, those of one prompt side by side.

    Attributes:
        completions: P x G of them.
        rewards_PG: float32 [P, G], as the task gave them; NaN where it gave none.
        penalties_PG: float32 [P, G], what is added to them, at most 0; None for nothing.
    """

    completions: tuple[Completion, ...]
    rewards_PG: Tensor
    penalties_PG: Tensor | None = None

    @property
    def shaped_PG(self) -> Tensor:
        """What advantages are made from: rewards and penalties, float32 [P, G]."""
        return self.rewards_PG if self.penalties_PG is None else self.rewards_PG + self.penalties_PG

    @property
    def unmixed_P(self) -> Tensor:
        """Bool [P]: groups that carry no signal, all that they earn being equal."""
        return zero_variance(self.shaped_PG)

    def __len__(self) -> int:
        return len(self.rewards_PG)

    def take(self, index: Sequence[int]) -> "Groups":
        """The groups at ``index``."""
        each = self.rewards_PG.shape[1]
        chosen = [c for i in index for c in self.completions[i * each : (i + 1) * each]]
        penalties = None if self.penalties_PG is None else self.penalties_PG[list(index)]
        return Groups(tuple(chosen), self.rewards_PG[list(index)], penalties)

    def __add__(self, other: "Groups") -> "Groups":
        rewards, penalties = torch.cat([self.rewards_PG, other.rewards_PG]), None
        if self.penalties_PG is not None and other.penalties_PG is not None:
            penalties = torch.cat([self.penalties_PG, other.penalties_PG])
        return Groups(self.completions + other.completions, rewards, penalties)

    def mixed_first(self, count: int) -> "Groups":
        """``count`` groups, in order: mixed ones, and only where these are too few, others."""
        equal = self.unmixed_P.tolist()
        ranked = sorted(range(len(self)), key=lambda i: equal[i])
        return self.take(sorted(ranked[:count]))

    def lengths(self) -> Tensor:
        """Sampled tokens of each completion, int64 [P, G]."""
        return torch.tensor([len(c.token_ids_N) for c in self.completions]).view_as(self.rewards_PG)

    def metrics(self) -> dict[str, Metric]:
        """What the completions were like; TRL's names, without ``train/``."""
        rewards_B, length_B = self.rewards_PG.flatten(), self.lengths().flatten()
        ended_B = torch.tensor([not c.truncated for c in self.completions])
        known_B, all_B = rewards_B.isfinite(), torch.ones_like(ended_B)
        apart_PG = self.rewards_PG - self.rewards_PG.nanmean(dim=1, keepdim=True)
        penalties = {}
        if self.penalties_PG is not None:
            everywhere = torch.ones_like(self.penalties_PG, dtype=torch.bool)
            penalties["length_penalty"] = mean(self.penalties_PG, everywhere)
        return penalties | {
            "reward": mean(rewards_B, known_B),
            "reward_std": deviation(rewards_B, known_B),
            "reward_variance_within": mean(apart_PG.square(), self.rewards_PG.isfinite()),
            "rewards_missing": Metric("sum", float((~known_B).sum())),
            "frac_reward_zero_std": mean(self.unmixed_P, torch.ones_like(self.unmixed_P)),
            "completions/mean_length": mean(length_B, all_B),
            "completions/min_length": smallest(length_B),
            "completions/max_length": largest(length_B),
            "completions/mean_terminated_length": mean(length_B, ended_B),
            "completions/min_terminated_length": smallest(length_B[ended_B]),
            "completions/max_terminated_length": largest(length_B[ended_B]),
            "completions/clipped_ratio": mean(~ended_B, all_B),
        }
