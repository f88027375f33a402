"""No weight decay on quantized weights.

Decay shrinks every weight a little each step. In a 4-bit format such a shrink, which carries no
signal, can flip a weight's code ("The 4-bitter Lesson").
"""

from typing_extensions import override

from callbacks.base import PrecisionCallback
from lightning_qrl.precision import PrecisionPlan


class NoDecayOnQuantized(PrecisionCallback):
    """Sets the weight decay of quantized weights to 0."""

    @override
    def declare(self, plan: PrecisionPlan) -> None:
        plan.no_decay_on_quantized()
