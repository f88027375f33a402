"""What a rollout engine is."""

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from lightning_qrl.experience import Completion


class RolloutEngine(Protocol):
    """Samples completions from a policy.

    Attributes:
        temperature: divides the logits before sampling; the trainer divides its logits by it too.
        max_new_tokens: length limit of a completion, the end-of-sequence token included.
        head: each token carries the log-probabilities of so many of the likeliest tokens; whoever
            needs them sets it before sampling.
    """

    temperature: float
    max_new_tokens: int
    head: int

    def sync(self, model: nn.Module, version: int) -> None:
        """Take over the weights of ``model``; from now on tokens are stamped with ``version``."""

    def generate(
        self, prompts: Sequence[Sequence[int]], *, samples: int, seed: int
    ) -> list[Completion]:
        """Sample ``samples`` completions of each prompt.

        Args:
            prompts: token ids of each prompt.
            samples: completions of each prompt.
            seed: decides every draw.

        Returns:
            ``len(prompts) * samples`` completions, those of one prompt side by side.
        """
