"""The corrections of a run: callbacks add them, the objective applies them.

    value_t  ->  value_t prod_k f_k(ratio_t)  +  A c_t

f_k are the importance weights (`weights`), c_t the centering of the score (`centering`), and the
advantages A may get another baseline before all of it (`baseline`). A stack without corrections
changes nothing, not even a bit. The order in which they were added is irrelevant.

What stands for the ratio between trainer and sampler takes the place of the loss's own. What only
takes tokens out, or moves a baseline, leaves the loss's ratio against the sampler as it is.

B completions, S predictions.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_qrl.corrections.base import Weight, log_ratios
from lightning_qrl.corrections.baseline import MinimumVariance
from lightning_qrl.corrections.centering import Centering
from lightning_qrl.corrections.effects import rejection_metrics, weight_metrics
from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience
from lightning_qrl.logprobs import Scores
from lightning_qrl.losses.base import Loss
from lightning_qrl.metrics import Metric
from lightning_qrl.rollouts.base import RolloutEngine

Correction = Weight | Centering | MinimumVariance  # every kind of them


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

    @property
    def baselines(self) -> Mapping[str, MinimumVariance]:
        """Other baselines of the advantages, by who asked for them: one at most."""
        return {by: c for by, c in sorted(self._by.items()) if isinstance(c, MinimumVariance)}

    @property
    def centering(self) -> Mapping[str, Centering]:
        """The centering of the score, by who asked for it: one at most."""
        return {by: c for by, c in self._by.items() if isinstance(c, Centering)}

    @property
    def head(self) -> int:
        """Log-probabilities of how many likeliest tokens the sampler has to tell."""
        return max((c.head for c in self.centering.values()), default=0)

    @property
    def stand_for_ratio(self) -> bool:
        """Whether something here accounts for the ratio between trainer and sampler."""
        return bool(self.centering) or any(w.reweighs for w in self.weights.values())

    def check(self, loss: Loss, updates: int, whole_groups: bool = True) -> None:
        """Raise UserError where corrections undo each other, or the loss has no use for them.

        Args:
            loss: what they correct.
            updates: optimizer steps on one rollout.
            whole_groups: whether every micro-batch holds all completions of each of its prompts.
        """
        reweighing = [by for by, weight in self.weights.items() if weight.reweighs]
        if len(reweighing) > 1:
            raise UserError(
                f"callbacks {' and '.join(reweighing)} each weigh with the importance ratio, which "
                "would count twice; take all but one of them out"
            )
        for by, weight in self.weights.items():
            if weight.level not in loss.levels:
                levels = " or ".join(loss.levels)
                raise UserError(
                    f"callbacks.{by}.level: loss {type(loss).__name__.lower()} cannot be weighed "
                    f"by {weight.level}, only by {levels}; change the level or the loss"
                )
        for kind in (self.baselines, self.centering):
            if len(kind) > 1:
                raise UserError(
                    f"callbacks {' and '.join(kind)} each do the same, which once undoes and twice "
                    "overdoes; take all but one of them out"
                )
        for by, baseline in self.baselines.items():
            baseline.check(loss, whole_groups, by=by)
        for by, centering in self.centering.items():
            centering.check(loss, updates, self.weights, by=by)

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise UserError where the sampler cannot give what a correction needs."""
        for by in self.centering:
            if engine.truncation:
                raise UserError(
                    f"{by} needs the whole distribution that tokens are sampled from; take "
                    "rollout.top_p, top_k and min_p out"
                )

    def wants_proximal(self, loss: Loss, updates: int) -> bool:
        """Whether the trainer must score a rollout before its first update."""
        return self.stand_for_ratio and loss.uses_ratio and updates > 1

    def anchored(self, loss: Loss, scores: Scores, experience: Experience) -> Experience:
        """The batch with the log-probabilities that the loss takes its ratio against."""
        if not self.stand_for_ratio or not loss.uses_ratio or experience.proximal_BS is not None:
            return experience
        return replace(experience, proximal_BS=scores.logprobs.detach())

    def rebased(self, scores: Scores, experience: Experience) -> Experience:
        """The batch with the advantages that the loss takes."""
        for baseline in self.baselines.values():
            trainers_BS = _trainers(scores, experience)
            log_ratio_B1 = log_ratios(trainers_BS, experience, "sequence", limit=torch.inf)
            advantages_B = baseline(log_ratio_B1[:, 0], scores, experience)
            experience = replace(experience, advantages_B=advantages_B)
        return experience

    def __call__(
        self, values_BS: Tensor, scores: Scores, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Corrected values of the tokens, float32 [B, S], and metrics as under ``rollout_corr/``.

        Args:
            values_BS: the loss of each token.
            scores: what the trainer makes of the tokens.
            experience: the micro-batch, anchored and rebased.
        """
        metrics: dict[str, Metric] = {}
        applied: list[Tensor] = []
        kept: list[Tensor] = []
        for weight in self.weights.values():
            ratio = log_ratios(_trainers(scores, experience), experience, weight.level).exp()
            (applied if weight.reweighs else kept).append(weight(ratio))
            if weight.reweighs:
                metrics |= weight_metrics(weight, ratio, experience.mask_BS)
        if kept:
            metrics |= rejection_metrics(reduce(torch.mul, kept), experience.mask_BS)
        if self.weights:
            values_BS = values_BS * reduce(torch.mul, applied + kept)
        for centering in self.centering.values():
            drift_BS, told = centering(scores, experience, list(self.weights.values()))
            values_BS = values_BS + experience.advantages_B[:, None] * drift_BS
            metrics |= told
        return values_BS, metrics


def _trainers(scores: Scores, experience: Experience) -> Tensor:
    """The log-probabilities that ratios are taken of, float32 [B, S]; see `base`."""
    if experience.proximal_BS is not None:
        return experience.proximal_BS
    return scores.logprobs.detach()
