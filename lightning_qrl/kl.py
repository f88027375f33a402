"""The KL divergence to a reference policy, estimated on the sampled tokens, as a penalty.

With d = log pi(token) - log pi_ref(token) (Schulman, "Approximating KL divergence", 2020):

    k1 = d                unbiased, may be negative
    k2 = d^2 / 2          biased, never negative
    k3 = e^-d - 1 + d     unbiased, never negative; GRPO's (Shao et al., arXiv 2402.03300, eq. 4)

An unbiased value has not always an unbiased gradient. On the policy's own samples, E[grad k2] is
the gradient of KL(pi || pi_ref), while E[grad k1] is 0 whatever the reference, and E[grad k3] is
the gradient of KL(pi_ref || pi). So k1 takes k2's gradient here: its value is k1, what it trains is
the reverse KL. The gradient flows through the policy alone. Off policy none of them is corrected.

B completions, S predictions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


def k1(difference: Tensor) -> Tensor:
    """The value of d with the gradient of d^2 / 2."""
    half_square = difference.square() / 2
    return difference.detach() + half_square - half_square.detach()


def k2(difference: Tensor) -> Tensor:
    """d^2 / 2."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """e^-d - 1 + d."""
    return (-difference).expm1() + difference


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """A penalty on the KL divergence to the reference, for each token.

    Attributes:
        kl_coef: its weight in the loss; 0 for none.
        kl_estimator: ``k1``, ``k2`` or ``k3``.

    Raises:
        ValueError: the weight is negative or infinite, or there is no such estimator.
    """

    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"

    def __post_init__(self) -> None:
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"kl_coef must be at least 0 and finite, got {self.kl_coef}")
        if self.kl_estimator not in ESTIMATORS:
            raise ValueError(f"kl_estimator must be k1, k2 or k3, got {self.kl_estimator!r}")

    def per_token(self, logprobs_BS: Tensor, reference_BS: Tensor, mask_BS: Tensor) -> Tensor:
        """The estimate of each token, float32 [B, S], without the weight; 0 outside the mask."""
        difference_BS = (logprobs_BS - reference_BS.detach()).masked_fill(~mask_BS, 0.0)
        return ESTIMATORS[self.kl_estimator](difference_BS)
