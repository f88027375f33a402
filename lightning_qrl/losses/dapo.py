"""DAPO's token-level clipped loss (Yu et al., arXiv 2503.14476, equation 8).

    L = - sum_i sum_t min( rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i ) / N

N counts the sampled tokens of the whole optimizer step (all micro-batches, all ranks), so a long
completion weighs as much as its tokens. The upper clip is wider, to let unlikely tokens grow.
See `_clipped` for the ratio rho and for why the loss stays near 0.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._clipped import ClippedLoss
from lightning_qrl.losses._reductions import token_mean


@dataclass(frozen=True)
class Dapo(ClippedLoss):
    """Token-level clipped policy loss, averaged over the tokens of the step.

    Attributes:
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
    """

    clip_high: float = 0.28

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return token_mean(values_BS, experience)
