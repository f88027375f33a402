"""Truncated sampling: only the likelier tokens, their probabilities renormalised.

Applied to the logits after the temperature, in the order of transformers and TRL, whose names and
meanings these are:

1. top_k: the k likeliest tokens (and those as likely as the last of them);
2. top_p: the likeliest tokens that together reach the probability p (Holtzman et al.,
   arXiv 1904.09751);
3. min_p: the tokens at least min_p times as likely as the likeliest (Nguyen et al.,
   arXiv 2407.01082).

The log-probabilities of a truncated sampler are those of the renormalised distribution. A trainer
that normalised over the whole vocabulary would start with importance ratios below 1: hence each
sampled token carries the ids that were left.

D distributions, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

NO_IDS = torch.LongTensor()  # warpers look at the scores alone


@dataclass(frozen=True)
class Truncation:
    """What is cut off a distribution; by default nothing.

    Attributes:
        top_p: probability that the kept tokens reach together, in (0, 1]; 1 keeps all.
        top_k: how many tokens are kept; 0 keeps all.
        min_p: probability of a kept token relative to the likeliest, in [0, 1); 0 keeps all.

    Raises:
        ValueError: an attribute is out of range.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be at least 0 and below 1, got {self.min_p}")

    @cached_property
    def _warpers(self) -> LogitsProcessorList:
        warpers = LogitsProcessorList()
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    def __bool__(self) -> bool:
        """Whether anything is cut off."""
        return bool(self._warpers)

    def __call__(self, scores_DV: Tensor) -> Tensor:
        """The scores, float32 [D, V], with minus infinity in place of what is cut off."""
        scores: Tensor = self._warpers(NO_IDS, scores_DV)
        return scores


def kept_ids(scores_DV: Tensor) -> list[Tensor]:
    """The ids that each distribution keeps, int64 [K] each, ascending, on the CPU."""
    kept_DV = (scores_DV > -torch.inf).cpu()
    return list(torch.split(kept_DV.nonzero()[:, 1], kept_DV.sum(dim=-1).tolist()))
