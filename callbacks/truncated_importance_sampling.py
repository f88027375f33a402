"""Truncated importance sampling: each token weighs min(r, cap), r = pi_trainer / pi_sampler (TIS).

The ratio of the token, of the whole completion (``level: sequence``), or its geometric mean; see
`lightning_qrl.corrections.weights` for sources and for what the loss is divided by, and
`lightning_qrl.corrections.base` for which policy the trainer's is.
"""

from typing_extensions import override

from callbacks.base import CorrectionCallback
from lightning_qrl.corrections.base import Level
from lightning_qrl.corrections.stack import Corrections
from lightning_qrl.corrections.weights import Truncated


class TruncatedImportanceSampling(CorrectionCallback):
    """Weighs with the importance ratio, at most ``cap``.

    Args:
        level: ``token``, ``sequence`` or ``geometric``.
        cap: the largest weight, at least 1; infinite for plain importance sampling.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, level: Level = "token", cap: float = 2.0) -> None:
        super().__init__()
        self.weight = Truncated(level, cap)

    @override
    def correct(self, corrections: Corrections) -> None:
        corrections.add(self.weight, by=self.handle)
