"""The clipped loss averaged over the tokens of the local batch (TRL's ``loss_type="bnpo"``).

    L = - 1/R sum_r sum_i sum_t min( rho_it A_i, clip(rho_it, 1 -+ clip) A_i ) / N_r

R ranks; N_r counts the sampled tokens of rank r's share of the optimizer step. On one rank this is
`dapo` with GRPO's clip; on several, a rank with few tokens weighs each of them more. TRL's local
batch is a micro-batch; ours is the rank's whole share, so that accumulation changes no gradient.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._clipped import ClippedLoss
from lightning_qrl.losses._reductions import rank_token_mean


@dataclass(frozen=True)
class Bnpo(ClippedLoss):
    """Clipped policy loss, averaged over each rank's tokens, then over ranks.

    Attributes:
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
    """

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return rank_token_mean(values_BS, experience)
