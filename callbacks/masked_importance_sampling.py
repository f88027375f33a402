"""Masked importance sampling: a token weighs r = pi_trainer / pi_sampler inside a band, else 0.

IcePop at the level of tokens; of whole completions with ``low: 0`` it is Seq-MIS. See
`lightning_qrl.corrections.weights` for sources and for what the loss is divided by, and
`lightning_qrl.corrections.base` for which policy the trainer's is.
"""

from typing_extensions import override

from callbacks.base import CorrectionCallback
from lightning_qrl.corrections.base import Level
from lightning_qrl.corrections.stack import Corrections
from lightning_qrl.corrections.weights import Masked


class MaskedImportanceSampling(CorrectionCallback):
    """Weighs with the importance ratio, and takes out what lies outside of a band.

    Args:
        level: ``token``, ``sequence`` or ``geometric``.
        low: the smallest ratio inside the band, 0 to 1.
        high: the largest, at least 1.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, level: Level = "token", low: float = 0.5, high: float = 5.0) -> None:
        super().__init__()
        self.weight = Masked(level, low, high)

    @override
    def correct(self, corrections: Corrections) -> None:
        corrections.add(self.weight, by=self.handle)
