"""What a rollout engine is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from lightning_qrl.errors import UserError
from lightning_qrl.experience import Completion
from lightning_qrl.rollouts._truncation import Truncation


class NonfiniteLogits(UserError):
    """A policy's logits are not finite: nothing can be sampled."""


class RolloutEngine(Protocol):
    """Samples completions from a policy.

    Attributes:
        temperature: divides the logits before sampling; the trainer divides its logits by it too.
        max_new_tokens: length limit of a completion, the end-of-sequence token included.
        head: each token carries the log-probabilities of so many of the likeliest tokens; whoever
            needs them sets it before sampling (see `telling`).
        routes: each completion carries the experts that its tokens went to; whoever needs them sets
            it (see `recording_routes`).
        truncation: what is cut off each distribution before it is sampled from.
        follows_plan: whether the policy's own layers sample, in the plan's rollout precision.
    """

    temperature: float
    max_new_tokens: int
    head: int
    routes: bool
    truncation: Truncation
    follows_plan: bool

    def sync(self, model: nn.Module, version: int) -> None:
        """Take over the weights of ``model``; from now on tokens are stamped with ``version``."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        seed: int,
        limits: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Sample ``samples`` completions of each prompt.

        Args:
            prompts: token ids of each prompt.
            samples: completions of each prompt.
            seed: decides every draw.
            limits: most new tokens of each prompt's completions; by default `max_new_tokens`.

        Returns:
            ``len(prompts) * samples`` completions, those of one prompt side by side.

        Raises:
            NonfiniteLogits: there is no distribution to sample from.
        """


@contextmanager
def telling(engine: RolloutEngine, head: int) -> Iterator[None]:
    """Meanwhile each token carries the log-probabilities of the ``head`` likeliest tokens."""
    engine.head, before = head, engine.head
    try:
        yield
    finally:
        engine.head = before


@contextmanager
def recording_routes(engine: RolloutEngine) -> Iterator[None]:
    """Meanwhile each completion carries the experts that its tokens went to."""
    engine.routes = True
    try:
        yield
    finally:
        engine.routes = False
