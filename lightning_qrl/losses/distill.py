"""On-policy distillation: each token's advantage is how much likelier the teacher finds it.

(Thinking Machines, "On-Policy Distillation", October 2025, and their cookbook; discount 0.)

    L    = - sum_i sum_t rho_it A_it / N
    A_it = - coef ( log pi_sampler(token_it) - log pi_teacher(token_it) )

The student samples, the teacher (``grpo.reference``) judges every token: the gradient is that of
the reverse KL, one token ahead. rho is the importance ratio, 1 on the first update of a rollout; N
counts the sampled tokens of the whole optimizer step. The task's rewards are logged, not used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._reductions import token_mean
from lightning_qrl.losses.base import Loss, log_ratio, ratio_metrics
from lightning_qrl.metrics import Metric, mean


@dataclass(frozen=True)
class Distill(Loss):
    """Policy gradient of the reverse KL to a teacher.

    Attributes:
        coef: weight of the reverse KL.

    Raises:
        ValueError: it is not above 0 and finite.
    """

    coef: float = 1.0
    needs_reference: ClassVar[bool] = True
    learns_from_rewards: ClassVar[bool] = False
    levels: ClassVar[Sequence[str]] = ("token",)  # it judges tokens one by one

    def __post_init__(self) -> None:
        if not 0 < self.coef < math.inf:
            raise ValueError(f"coef must be above 0 and finite, got {self.coef}")

    @override
    def per_token(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        assert experience.reference_BS is not None
        reverse_kl_BS = experience.logprobs_BS - experience.reference_BS
        ratio_BS = log_ratio(logprobs_BS, experience).exp()
        metrics = ratio_metrics(ratio_BS, ratio_BS, experience.mask_BS)
        metrics["teacher_kl"] = mean(reverse_kl_BS, experience.mask_BS)
        return ratio_BS * self.coef * reverse_kl_BS, metrics

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return token_mean(values_BS, experience)
