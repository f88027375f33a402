"""BF16 tail: the last decoder layers stay in BF16.

They are close to the logits, so their error reaches the policy undiluted ("The 4-bitter Lesson",
last 15%; NVIDIA keeps the last blocks in pretraining too, arXiv 2509.25149).
"""

from typing_extensions import override

from callbacks.base import PrecisionCallback
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.precision.select import LastFraction


class BF16Tail(PrecisionCallback):
    """Keeps the linear layers of the last decoder layers in BF16.

    Args:
        fraction: share of the decoder layers, 0 to 1, rounded to the nearest whole layer; at least
            one layer when above 0.

    Raises:
        ValueError: the fraction is out of range.
    """

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.where = LastFraction(fraction)

    @override
    def declare(self, plan: PrecisionPlan) -> None:
        plan.keep(self.where, by=self.handle)
