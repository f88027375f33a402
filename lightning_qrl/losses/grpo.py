"""GRPO's loss (Shao et al., arXiv 2402.03300, equation 3, without its KL term; see `kl`).

    L = - 1/C sum_i 1/|o_i| sum_t min( rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i )

C counts the completions of the whole optimizer step that have a token in the mask, |o_i| a
completion's tokens. Dividing by |o_i| makes each token of a long completion weigh less: wrong ones
grow longer, right ones shorter (Liu et al., arXiv 2503.20783, section 3.1).
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._clipped import ClippedLoss
from lightning_qrl.losses._reductions import completion_mean


@dataclass(frozen=True)
class Grpo(ClippedLoss):
    """Clipped policy loss, averaged over each completion's tokens, then over completions.

    Attributes:
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
    """

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return completion_mean(values_BS, experience)
