"""What is done about completions that ran, or nearly ran, into the length limit.

Masking: a truncated completion has no verdict on it that means anything, so it is left out of the
loss, in numerator and denominator (DAPO's "overlong filtering", Yu et al., arXiv 2503.14476,
section 3.4; TRL's ``mask_truncated_completions``). Its reward stays in its group's baseline.

The soft penalty of the same section, equation 13, with L tokens, the limit L_max =
``max_new_tokens`` and a buffer before it:

    penalty * min( 0, (L_max - buffer - L) / buffer )        from 0 down to -penalty at the limit
"""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Overlong:
    """How overlong completions are treated.

    Attributes:
        mask_truncated_completions: leave truncated completions out of the loss.
        overlong_buffer: tokens before the limit in which the penalty grows; 0 for no penalty.
        overlong_penalty: what is taken off the reward of a completion at the limit.

    Raises:
        ValueError: a number is out of range.
    """

    mask_truncated_completions: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.overlong_buffer < 0:
            raise ValueError(f"overlong_buffer must be at least 0, got {self.overlong_buffer}")
        if not 0 < self.overlong_penalty < math.inf:
            raise ValueError(
                f"overlong_penalty must be above 0 and finite, got {self.overlong_penalty}; "
                "overlong_buffer=0 turns the penalty off"
            )

    def penalties(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        """What is added to the rewards, float32, at most 0.

        Args:
            lengths: int64, any shape: sampled tokens of each completion.
            max_new_tokens: the length limit.
        """
        room = max_new_tokens - self.overlong_buffer - lengths
        return self.overlong_penalty * (room.float() / max(self.overlong_buffer, 1)).clamp_max(0.0)
