"""Dequantized backward: the gradient of the function that the forward really ran.

dX = dY DQ(Q(W)) and dW = dY^T DQ(Q(X)), with the very codes of the forward and an unquantized dY
("The 4-bitter Lesson"; Transformer Engine's `backward_override="dequantized"`). Without it the
backward takes the original operands: the gradient of a function that was never evaluated.
"""

from typing_extensions import override

from callbacks.base import PrecisionCallback
from lightning_qrl.precision import PrecisionPlan


class DequantizedBackward(PrecisionCallback):
    """Lets the backward GEMMs of quantized layers take the dequantized operands.

    Args:
        where: a selector of layers.
    """

    def __init__(self, where: str = "linears") -> None:
        super().__init__()
        self.where = where

    @override
    def declare(self, plan: PrecisionPlan) -> None:
        plan.quantize(self.where, by=self.handle, backward="dequantized")
