"""What a policy loss is: a value for each token, and how the values of a step become one number.

    loss(log-probabilities, experience) = reduce( per_token(log-probabilities, experience) )

The two halves are apart so that whatever works on tokens (a penalty, a correction of the sampler's
bias) is averaged just as the loss is. A loss is a frozen dataclass: its fields are its options.

B completions, S predictions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_qrl.experience import Experience
from lightning_qrl.metrics import Metric, largest, mean, smallest


class Loss(ABC):
    """A policy loss: a pure function of the policy's log-probabilities and a batch.

    Attributes:
        needs_reference: whether the batch must carry a reference policy's log-probabilities.
        learns_from_rewards: whether the advantages of the batch matter.
        uses_ratio: whether it weighs with the importance ratio of `log_ratio`.
        levels: what may have an importance weight: each token, or a completion by its whole ratio
            (sequence) or the mean of its tokens' (geometric).
    """

    needs_reference: ClassVar[bool] = False
    learns_from_rewards: ClassVar[bool] = True
    uses_ratio: ClassVar[bool] = True
    levels: ClassVar[Sequence[str]] = ("token", "sequence", "geometric")

    @abstractmethod
    def per_token(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Each token's value and gradient, anything outside the mask; metrics as under ``train/``.

        Args:
            logprobs_BS: float32 [B, S], log-probabilities under the policy that is trained.
            experience: the micro-batch.
        """

    @abstractmethod
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        """The micro-batch's share of the step's average of values for each token."""

    def __call__(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The loss of one micro-batch and its metrics.

        Returns:
            The scalar whose sum over the micro-batches of an optimizer step is the loss of the
            step, and metrics named as under ``train/``.
        """
        values_BS, metrics = self.per_token(logprobs_BS, experience)
        return self.reduce(values_BS, experience), metrics


LARGEST_CLIP = 1e9  # no ratio is larger: they end at e^LIMIT
LIMIT = 20.0  # of a log-ratio, as in verl: e^20 is far beyond any clip, and its square is finite


def log_ratio(logprobs_BS: Tensor, experience: Experience) -> Tensor:
    """The log of the importance ratio, within +-`LIMIT`; exactly 0 outside the mask.

    pi(token) / pi_sampler(token), or, where a correction takes care of what the trainer's policy
    and the sampler's differ in, pi(token) / pi_proximal(token): the trainer's own before the first
    update on the rollout (the decoupled loss of Hilton et al., arXiv 2110.00641).

    Returns:
        float32 [B, S].
    """
    anchor_BS = experience.proximal_BS
    if anchor_BS is None:
        anchor_BS = experience.logprobs_BS
    ratio_BS = (logprobs_BS - anchor_BS).masked_fill(~experience.mask_BS, 0.0)
    return ratio_BS.clamp(-LIMIT, LIMIT)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise ValueError where [1 - clip_low, 1 + clip_high] is no interval around 1 above 0."""
    if not (0 <= clip_low < 1 and 0 <= clip_high <= LARGEST_CLIP):
        raise ValueError(
            f"clip_low must be in [0, 1) and clip_high at least 0 and at most {LARGEST_CLIP:g}, "
            f"got {clip_low} and {clip_high}"
        )


@torch.no_grad()
def ratio_metrics(ratio: Tensor, used: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Importance ratios as they are, and as the loss weighs with them.

    Args:
        ratio: of each token or completion.
        used: the same after clipping.
        mask: bool, where there is one.
    """
    named = {"importance_ratio/": ratio[mask], "importance_ratio/clipped_": used[mask]}
    metrics = {}
    for name, values in named.items():
        metrics[f"{name}min"] = smallest(values)
        metrics[f"{name}mean"] = mean(values, torch.ones_like(values, dtype=torch.bool))
        metrics[f"{name}max"] = largest(values)
    return metrics


@torch.no_grad()
def clip_metrics(low: Tensor, high: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Shares whose gradient a clip removed: below for A < 0, above for A > 0 (TRL's names).

    The minimum and maximum are over micro-batches.
    """
    low_mean, high_mean = mean(low, mask), mean(high, mask)
    some = float(mask.any())
    return {
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/low_min": Metric("min", low_mean.value(), some),
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/high_max": Metric("max", high_mean.value(), some),
        "clip_ratio/region_mean": mean(low | high, mask),
    }
