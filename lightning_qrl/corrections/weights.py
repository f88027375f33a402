"""The importance weights: functions f of the ratio r = pi_trainer / pi_sampler (see `base`).

    truncated    min(r, cap)                         TIS (Yao et al., "Your Efficient RL Framework
                                                     Secretly Brings You Off-Policy RL Training",
                                                     August 2025; arXiv 2510.26788 has cap 3)
    masked       r where low <= r <= high, else 0    IcePop (arXiv 2510.18855); of whole completions
                                                     with low 0: Seq-MIS (arXiv 2510.26788)
    rejection    1 where low <= r <= high, else 0    verl's ``rollout_rs``

E_sampler[ r g ] = E_trainer[ g ]: with f = r the gradient g is that of the trainer's own samples,
and its variance is what r makes it. The first two trade a bias for less of it; the third brings no
ratio in and only takes out what the two sides disagree on.

The denominators of the loss stay those of the step: they count a token whose weight is 0. A mean of
f g over all samples is what the expectation says; divided by what is left instead, a step that lost
nearly all its tokens would be as large as any other, on the strength of a few.

Every f has f(1) = 1, so that where sampler and trainer agree no gradient changes.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.corrections.base import Weight


@dataclass(frozen=True)
class Truncated(Weight):
    """The ratio, at most ``cap``.

    Attributes:
        level: see `Weight`.
        cap: the largest weight; infinite for plain importance sampling.

    Raises:
        ValueError: it is below 1, where it would scale down what needs no correction.
    """

    cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cap >= 1:
            raise ValueError(f"cap must be at least 1, the ratio without mismatch, got {self.cap}")

    @override
    def __call__(self, ratio: Tensor) -> Tensor:
        return ratio.clamp_max(self.cap)

    @property
    @override
    def band(self) -> tuple[float, float]:
        return 1 / self.cap, self.cap


@dataclass(frozen=True)
class Banded(Weight):
    """What treats ratios inside a band and outside of it differently.

    Attributes:
        level: see `Weight`.
        low: the smallest ratio inside the band.
        high: the largest; may be infinite.

    Raises:
        ValueError: the band does not hold 1, the ratio without mismatch.
    """

    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(
                "low and high must hold 1, the ratio without mismatch, between them: "
                f"0 <= low <= 1 <= high, got {self.low} and {self.high}"
            )

    def inside(self, ratio: Tensor) -> Tensor:
        """Whether each ratio is in the band, bool."""
        return (ratio >= self.low) & (ratio <= self.high)

    @property
    @override
    def band(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True)
class Masked(Banded):
    """The ratio inside a band, 0 outside."""

    high: float = 5.0

    @override
    def __call__(self, ratio: Tensor) -> Tensor:
        return torch.where(self.inside(ratio), ratio, 0.0)


@dataclass(frozen=True)
class Rejection(Banded):
    """1 inside a band, 0 outside.

    Raises:
        ValueError: the band does not hold 1, or holds every ratio.
    """

    reweighs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low == 0 and self.high == torch.inf:
            raise ValueError("low 0 and high inf hold every ratio, so nothing would be rejected")

    @override
    def __call__(self, ratio: Tensor) -> Tensor:
        return self.inside(ratio).to(ratio.dtype)
