"""What a correction is: importance weights, and the ratios that they are functions of.

With d_t = log pi_trainer(token_t) - log pi_sampler(token_t), the ratio of token t is taken at one
of three levels (all tokens of a completion then share it):

    token       r_t = exp(d_t)
    sequence    r   = exp(sum_t d_t)        the product: exact, and it explodes with the length
    geometric   r   = exp(mean_t d_t)       the geometric mean: as GSPO's ratio

A weight that stands for the ratio (`Weight.reweighs`) takes its place in a loss that has one: the
trainer's log-probabilities are then those before the first update on the rollout, and the loss's
own ratio is against these: it takes care of the updates since then (the decoupled loss of Hilton et
al., arXiv 2110.00641). Else they are those of now. No gradient flows through a ratio.

B completions, S predictions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_qrl.experience import Experience
from lightning_qrl.losses.base import LIMIT

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Weight(ABC):
    """Multiplies each token's loss with a function of its importance ratio.

    Attributes:
        level: whose ratio: of the token, of the completion, or the completion's geometric mean.
        reweighs: whether the weight stands for the ratio itself, so that two of a kind would count
            it twice; false for what only takes tokens out.

    Raises:
        ValueError: there is no such level.
    """

    level: Level = "token"
    reweighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise ValueError(
                f"level must be one of {', '.join(get_args(Level))}, got {self.level!r}"
            )

    @abstractmethod
    def __call__(self, ratio: Tensor) -> Tensor:
        """The weight of each ratio, elementwise, the same shape."""

    @property
    def band(self) -> tuple[float, float]:
        """Ratios below or above it are counted; verl's default threshold and its inverse."""
        return 0.5, 2.0


@torch.no_grad()
def log_ratios(
    logprobs_BS: Tensor, experience: Experience, level: Level, limit: float = LIMIT
) -> Tensor:
    """Logs of the ratio, float32 [B, S] (of a completion: [B, 1]).

    Args:
        logprobs_BS: float32 [B, S], the trainer's.
        experience: the micro-batch, with the sampler's; a token outside the mask has log-ratio 0.
        level: whose ratio.
        limit: of its size.
    """
    mask_BS = experience.mask_BS
    d_BS = (logprobs_BS - experience.logprobs_BS).masked_fill(~mask_BS, 0.0)
    if level == "token":
        return d_BS.clamp(-limit, limit)
    total_B1 = d_BS.sum(dim=1, keepdim=True)
    if level == "geometric":
        total_B1 = total_B1 / mask_BS.sum(dim=1, keepdim=True).clamp_min(1)
    return total_B1.clamp(-limit, limit)
