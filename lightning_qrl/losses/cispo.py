"""CISPO: the importance ratio is clipped, the token's gradient is not.

MiniMax-M1 (arXiv 2506.13585, equation 4, without its lower bound, which they do not use); as in
ScaleRL (Khatri et al., arXiv 2510.13786):

    L = - sum_i sum_t sg( min(rho_it, 1 + clip_high) ) A_i log pi(token_it) / N

sg stops the gradient. N counts the sampled tokens of the whole optimizer step. A clipped surrogate
drops the tokens that it clips; here they keep a bounded weight. The value is no small number: it is
a weighted log-probability, and only its gradient means something.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._reductions import token_mean
from lightning_qrl.losses.base import LARGEST_CLIP, Loss, log_ratio, ratio_metrics
from lightning_qrl.metrics import Metric, mean


@dataclass(frozen=True)
class Cispo(Loss):
    """Policy gradient with a capped importance weight.

    Attributes:
        clip_high: the ratio is capped at 1 + clip_high.

    Raises:
        ValueError: it is negative, or larger than any ratio.
    """

    clip_high: float = 4.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_high <= LARGEST_CLIP:
            raise ValueError(f"clip_high must be 0 to {LARGEST_CLIP:g}, got {self.clip_high}")

    @override
    def per_token(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask_BS = experience.mask_BS
        ratio_BS = log_ratio(logprobs_BS.detach(), experience).exp()
        capped_BS = ratio_BS.clamp_max(1 + self.clip_high)
        advantages_B1 = experience.advantages_B[:, None]
        cut_BS = (ratio_BS > capped_BS) & (advantages_B1 > 0)
        metrics = ratio_metrics(ratio_BS, capped_BS, mask_BS)
        metrics["cispo_clip_ratio"] = mean(cut_BS, mask_BS)
        return -capped_BS * advantages_B1 * logprobs_BS, metrics

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return token_mean(values_BS, experience)
