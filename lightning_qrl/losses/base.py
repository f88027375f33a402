"""What a policy loss is, and the importance ratio that all of them share."""

from typing import Protocol

from torch import Tensor

from lightning_qrl.experience import Experience
from lightning_qrl.metrics import Metric


class Loss(Protocol):
    """A policy loss: a pure function of the policy's log-probabilities and a batch."""

    def __call__(
        self, logprobs_BS: Tensor, experience: Experience, *, clip_low: float, clip_high: float
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The loss of one micro-batch and its metrics.

        Args:
            logprobs_BS: float32 [B, S], log-probabilities under the policy that is trained.
            experience: the micro-batch.
            clip_low: the importance ratio is clipped below 1 - clip_low.
            clip_high: the importance ratio is clipped above 1 + clip_high.

        Returns:
            The scalar whose sum over the micro-batches of an optimizer step is the loss of the
            step, and metrics named as under ``train/``.
        """


def importance_ratio(logprobs_BS: Tensor, experience: Experience) -> Tensor:
    """pi(token) / pi_sampler(token), float32 [B, S]; exactly 1 outside the mask."""
    difference_BS = (logprobs_BS - experience.logprobs_BS).masked_fill(~experience.mask_BS, 0.0)
    return difference_BS.exp()
