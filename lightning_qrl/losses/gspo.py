"""GSPO: one importance ratio for a completion (Zheng et al., arXiv 2507.18071, equations 5 and 7).

    L   = - 1/C sum_i min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )
    s_i = ( pi(o_i) / pi_sampler(o_i) )^(1/|o_i|) = exp( 1/|o_i| sum_t log rho_it )

The geometric mean of the token ratios, not their product, which would explode or vanish with the
length. It stays much nearer to 1 than a token's ratio, and so does the clip (their section 5.1).
C counts the completions of the whole optimizer step that have a token in the mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._clipped import ClippedLoss
from lightning_qrl.losses._reductions import completion_mean
from lightning_qrl.losses.base import log_ratio
from lightning_qrl.metrics import Metric


@dataclass(frozen=True)
class Gspo(ClippedLoss):
    """Clipped policy loss of whole completions.

    Attributes:
        clip_low: the completion's ratio is clipped below 1 - clip_low.
        clip_high: the completion's ratio is clipped above 1 + clip_high.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    levels: ClassVar[Sequence[str]] = ("sequence", "geometric")  # a completion has one value

    @override
    def per_token(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        ratio_B1 = mean_log_ratio(logprobs_BS, experience).exp()
        some_B1 = experience.mask_BS.any(dim=1, keepdim=True)
        values_B1, metrics = self.surrogate(ratio_B1, experience.advantages_B[:, None], some_B1)
        return values_B1.expand_as(logprobs_BS), metrics

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return completion_mean(values_BS, experience)


def mean_log_ratio(logprobs_BS: Tensor, experience: Experience) -> Tensor:
    """Mean log-ratio of each completion's tokens, float32 [B, 1]; 0 where there are none."""
    length_B1 = experience.mask_BS.sum(dim=1, keepdim=True).clamp_min(1)
    return log_ratio(logprobs_BS, experience).sum(dim=1, keepdim=True) / length_B1
