"""The clipped surrogate of PPO (Schulman et al., arXiv 1707.06347, equation 7), token by token.

    value_t = - min( rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A )
    rho_t   = pi(token_t) / pi_sampler(token_t)

The ratio is against the policy that sampled, also in the second and later updates on a rollout. On
the first update it is 1 and the advantages of a group sum to 0, so the loss is near 0 while its
gradient is not: progress shows in the reward, not in the loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses.base import Loss, check_clip, clip_metrics, log_ratio, ratio_metrics
from lightning_qrl.metrics import Metric


@dataclass(frozen=True)
class ClippedLoss(Loss):
    """A loss over clipped tokens; subclasses say how they are averaged.

    Attributes:
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.

    Raises:
        ValueError: the clip is no interval around 1.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    @override
    def per_token(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        ratio_BS = log_ratio(logprobs_BS, experience).exp()
        advantages_B1 = experience.advantages_B[:, None]
        return self.surrogate(ratio_BS, advantages_B1, experience.mask_BS)

    def surrogate(
        self, ratio: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The clipped surrogate of ratios of tokens ([B, S]) or of completions ([B, 1])."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        clipped = ratio.clamp(low, high)
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
        used = torch.where(below | above, clipped, ratio)
        return -objective, ratio_metrics(ratio, used, mask) | clip_metrics(below, above, mask)
