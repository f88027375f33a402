"""Group-relative advantages: pure functions of the rewards of each prompt's group.

With G completions of one prompt, of which n have a reward:

    centered_i = r_i - mean(r)                      baseline "mean" (GRPO, Shao et al., arXiv
                                                    2402.03300, section 4.1)
    centered_i = r_i - mean of the others           baseline "leave_one_out" (RLOO, Ahmadian et al.,
               = n / (n - 1) (r_i - mean(r))        arXiv 2402.14740)

    A_i = centered_i / (std(r) + 1e-4)              scale_rewards "group": GRPO; std with ddof 1
    A_i = centered_i / (std of the batch + 1e-4)    "batch" (ScaleRL, arXiv 2510.13786)
    A_i = centered_i                                "none" (Dr. GRPO, arXiv 2503.20783)

A group whose rewards are all equal says nothing about which completion is better: its advantages
are exactly 0 (not rounding noise divided by 1e-4), and callers count such groups. A completion
without a reward (NaN) has advantage 0 and is in neither baseline nor deviation.

P prompts, G completions of each, B = P G.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_qrl.metrics import deviation

STD_EPSILON = 1e-4  # as TRL


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """Turns rewards into advantages.

    Attributes:
        baseline: ``"mean"`` of the group or ``"leave_one_out"``.
        scale_rewards: ``"group"``, ``"batch"`` or ``"none"``: what the centered rewards are divided
            by (TRL's name).

    Raises:
        ValueError: an unknown name.
    """

    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale_rewards: Literal["group", "batch", "none"] = "group"

    def __post_init__(self) -> None:
        if self.baseline not in ("mean", "leave_one_out"):
            raise ValueError(f"baseline must be mean or leave_one_out, got {self.baseline!r}")
        if self.scale_rewards not in ("group", "batch", "none"):
            raise ValueError(
                f"scale_rewards must be group, batch or none, got {self.scale_rewards!r}"
            )

    def __call__(self, rewards_PG: Tensor, batch_std: float | None = None) -> Tensor:
        """Advantages of a rollout.

        Args:
            rewards_PG: float [P, G], NaN where there is no reward.
            batch_std: for ``scale_rewards="batch"``, the deviation over the rewards of all ranks;
                by default that of ``rewards_PG``.

        Returns:
            The shape and dtype of ``rewards_PG``; exactly 0 in groups of equal rewards and where
            there is no reward.
        """
        count_P1 = rewards_PG.isfinite().sum(dim=1, keepdim=True)
        centered = rewards_PG.double() - rewards_PG.double().nanmean(dim=1, keepdim=True)
        if self.baseline == "leave_one_out":
            centered = centered * count_P1 / (count_P1 - 1).clamp_min(1)
        if self.scale_rewards == "group":
            squares_P1 = _deviations(rewards_PG).square().sum(dim=1, keepdim=True)
            centered = centered / ((squares_P1 / (count_P1 - 1).clamp_min(1)).sqrt() + STD_EPSILON)
        elif self.scale_rewards == "batch":
            if batch_std is None:
                batch_std = deviation(rewards_PG, rewards_PG.isfinite()).value()
            centered = centered / (batch_std + STD_EPSILON)
        centered = centered.nan_to_num(nan=0.0).masked_fill(zero_variance(rewards_PG)[:, None], 0.0)
        return centered.to(rewards_PG.dtype)


def zero_variance(rewards_PG: Tensor) -> Tensor:
    """Bool [P]: groups whose rewards are all equal (or missing), so that they carry no signal."""
    low = rewards_PG.nan_to_num(nan=torch.inf).amin(dim=1)
    high = rewards_PG.nan_to_num(nan=-torch.inf).amax(dim=1)
    return low >= high


def leverage(rewards_PG: Tensor) -> Tensor:
    """How much each completion can move the policy: its squared, standardized reward.

    With rewards 0 and 1 and a solve rate p this is (1 - p) / p for a right and p / (1 - p) for a
    wrong completion; in every mixed group the mean is 1 ("high-leverage samples", Applied Compute,
    March 2026). It is 0 in groups of equal rewards and where there is no reward.

    Args:
        rewards_PG: float [P, G]: the full groups, nothing selected yet.

    Returns:
        float [P, G].
    """
    deviations_PG = _deviations(rewards_PG).masked_fill(zero_variance(rewards_PG)[:, None], 0.0)
    variance_P1 = deviations_PG.square().sum(dim=1, keepdim=True)
    count_P1 = rewards_PG.isfinite().sum(dim=1, keepdim=True)
    leverage_PG = deviations_PG.square() * count_P1 / variance_P1.masked_fill(variance_P1 == 0, 1.0)
    return leverage_PG.to(rewards_PG.dtype)


def highest(leverage_B: Tensor, share: float, at_least: int) -> Tensor:
    """The smallest set of completions that holds a share of all leverage.

    Args:
        leverage_B: float [B].
        share: of the sum, 0 to 1.
        at_least: completions to take in any case.

    Returns:
        int64: their indices, ascending.
    """
    ordered, order = leverage_B.double().sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    needed = int((before < share * ordered.sum()).sum())
    return order[: max(needed, at_least)].sort().values


def _deviations(rewards_PG: Tensor) -> Tensor:
    """From the group's mean, float64; 0 where there is no reward."""
    rewards_PG = rewards_PG.double()  # the squares of large rewards are beyond FP32
    return (rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
