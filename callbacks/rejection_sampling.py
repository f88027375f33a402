"""Rejection sampling: takes out what trainer and sampler disagree on (verl's ``rollout_rs``).

A token, or with ``level: sequence`` or ``geometric`` a whole completion, counts where its ratio
r = pi_trainer / pi_sampler lies in a band, and has no gradient elsewhere. It brings no importance
weight in: the loss keeps its own ratio against the sampler, and `truncated_importance_sampling`
beside it is verl's ``seq_is_rs``. The denominator of the loss stays that of the whole step
(`lightning_qrl.corrections.weights` says why).
"""

from typing_extensions import override

from callbacks.base import CorrectionCallback
from lightning_qrl.corrections.base import Level
from lightning_qrl.corrections.stack import Corrections
from lightning_qrl.corrections.weights import Rejection


class RejectionSampling(CorrectionCallback):
    """Takes out tokens or completions whose ratio lies outside of a band.

    Args:
        level: ``token``, ``sequence`` (the product of the token ratios) or ``geometric`` (their
            geometric mean; a band of [0.999, 1.001] is usual there).
        low: the smallest ratio inside the band, 0 to 1.
        high: the largest, at least 1.

    Raises:
        ValueError: an argument is out of range, or the band holds every ratio.
    """

    def __init__(self, level: Level = "token", low: float = 0.5, high: float = 2.0) -> None:
        super().__init__()
        self.weight = Rejection(level, low, high)

    @override
    def correct(self, corrections: Corrections) -> None:
        corrections.add(self.weight, by=self.handle)
