"""The corrections of a run: callbacks add them, the objective applies them.

    value_t  ->  value_t prod_k f_k(ratio_t)  +  A c_t

f_k are the importance weights (`base.Weight`), c_t the centering of the score (`centering`), and
the advantages A may get another baseline before all of it (`baseline`). A stack without corrections
changes nothing, not even a bit. The order in which they were added is irrelevant.

B completions, S predictions.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_qrl.corrections.base import Weight, log_ratios
from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience
from lightning_qrl.logprobs import Scores
from lightning_qrl.losses.base import Loss
from lightning_qrl.metrics import Metric

Correction = Weight  # every kind of them


@runtime_checkable
class Corrects(Protocol):
    """Anything that adds corrections: the callbacks that are cures."""

    def correct(self, corrections: "Corrections") -> None:
        """Add them; no model exists yet."""


class Corrections:
    """What is done about the difference between sampler and trainer, by who asked for it."""

    def __init__(self) -> None:
        self._by: dict[str, Correction] = {}

    def add(self, correction: Correction, *, by: str) -> None:
        """Add a correction; ``by`` is the callback that asks, once."""
        self._by[by] = correction

    def __bool__(self) -> bool:
        return bool(self._by)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The importance weights, by who asked for them, sorted."""
        return {by: c for by, c in sorted(self._by.items()) if isinstance(c, Weight)}

    def check(self, loss: Loss, updates: int) -> None:
        """Raise UserError where corrections undo each other, or the loss has no use for them.

        Args:
            loss: what they correct.
            updates: optimizer steps on one rollout.
        """
        reweighing = [by for by, weight in self.weights.items() if weight.reweighs]
        if len(reweighing) > 1:
            raise UserError(
                f"callbacks {' and '.join(reweighing)} each weigh with the importance ratio, which "
                "would count twice; take all but one of them out"
            )

    def wants_proximal(self, loss: Loss, updates: int) -> bool:
        """Whether the trainer must score a rollout before its first update."""
        return bool(self) and loss.uses_ratio and updates > 1

    def anchored(self, loss: Loss, scores: Scores, experience: Experience) -> Experience:
        """The batch with the log-probabilities that the loss takes its ratio against."""
        if not self or not loss.uses_ratio or experience.proximal_BS is not None:
            return experience
        return replace(experience, proximal_BS=scores.logprobs.detach())

    def __call__(
        self, values_BS: Tensor, scores: Scores, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Corrected values of the tokens, float32 [B, S], and metrics as under ``rollout_corr/``.

        Args:
            values_BS: the loss of each token.
            scores: what the trainer makes of the tokens.
            experience: the micro-batch, anchored.
        """
        trainer_BS = experience.proximal_BS
        if trainer_BS is None:
            trainer_BS = scores.logprobs.detach()
        metrics: dict[str, Metric] = {}
        factors = []
        for weight in self.weights.values():
            ratio = log_ratios(trainer_BS, experience, weight.level).exp()
            factors.append(weight(ratio))
            metrics |= weight.metrics(ratio.expand_as(values_BS), experience.mask_BS)
        if factors:
            values_BS = values_BS * reduce(torch.mul, factors)
        return values_BS, metrics
