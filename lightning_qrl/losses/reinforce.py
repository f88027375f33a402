"""REINFORCE (Williams, 1992): the policy gradient as it stands.

    L = - 1/C sum_i A_i sum_t log pi(token_it)

C counts the completions of the whole optimizer step that have a token in the mask. There is no
importance ratio: with several updates on a rollout, or a sampler that is not the trained policy,
the gradient is biased. The value is a weighted log-probability; only its gradient means something.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._reductions import completion_sum
from lightning_qrl.losses.base import Loss
from lightning_qrl.metrics import Metric


@dataclass(frozen=True)
class Reinforce(Loss):
    """Policy gradient without an importance ratio."""

    uses_ratio: ClassVar[bool] = False

    @override
    def per_token(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        return -experience.advantages_B[:, None] * logprobs_BS, {}

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return completion_sum(values_BS, experience)
