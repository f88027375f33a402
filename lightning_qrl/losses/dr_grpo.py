"""Dr. GRPO's loss (Liu et al., arXiv 2503.20783, section 3.2 and its Listing 1).

    L = - sum_i sum_t min( rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i ) / (C L_max)

C counts the completions of the whole optimizer step that have a token in the mask; L_max is
``rollout.max_new_tokens``, a constant, so no completion is favoured for its length. Its authors
drop the division by the deviation too: ``grpo.scale_rewards: none``.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._clipped import ClippedLoss
from lightning_qrl.losses._reductions import fixed_length_mean


@dataclass(frozen=True)
class DrGrpo(ClippedLoss):
    """Clipped policy loss over a constant length.

    Attributes:
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
    """

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return fixed_length_mean(values_BS, experience)
