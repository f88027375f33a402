"""GSPO-token: GSPO's ratio, differentiated by token (Zheng et al., arXiv 2507.18071, eq. 13, 14).

    L    = - 1/C sum_i 1/|o_i| sum_t min( s_it A_i, clip(s_it, 1 - clip_low, 1 + clip_high) A_i )
    s_it = sg(s_i) pi(o_it) / sg(pi(o_it))

sg stops the gradient; s_i is `gspo`'s ratio, whose value s_it has. With one advantage for all
tokens of a completion, value and gradient are those of `gspo` (their equation 17); a per-token
weight on the values, such as a correction of the sampler's bias, makes them differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses.base import Loss, log_ratio
from lightning_qrl.losses.gspo import Gspo, mean_log_ratio
from lightning_qrl.metrics import Metric


@dataclass(frozen=True)
class GspoToken(Gspo):
    """Clipped policy loss of tokens, each with its completion's ratio.

    Attributes:
        clip_low: the completion's ratio is clipped below 1 - clip_low.
        clip_high: the completion's ratio is clipped above 1 + clip_high.
    """

    levels: ClassVar[Sequence[str]] = Loss.levels

    @override
    def per_token(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        log_ratio_BS = log_ratio(logprobs_BS, experience)
        own_BS = log_ratio_BS - log_ratio_BS.detach()  # 0, with the token's gradient
        ratio_BS = (mean_log_ratio(logprobs_BS, experience).detach() + own_BS).exp()
        return self.surrogate(ratio_BS, experience.advantages_B[:, None], experience.mask_BS)
