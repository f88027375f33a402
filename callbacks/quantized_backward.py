"""Quantized backward: all three GEMMs in low precision.

dX = Q(dY) Q_col(W) and dW = Q(dY)^T Q_col(X): the incoming gradient is quantized, and weight and
activation are quantized again along the axis that the backward sums over, so they differ from what
the forward used. This is what low-precision pretraining does (NVIDIA, arXiv 2509.25149).
"""

from typing import Any

from typing_extensions import override

from callbacks.base import PrecisionCallback
from lightning_qrl.formats import get_format
from lightning_qrl.precision import PrecisionPlan


class QuantizedBackward(PrecisionCallback):
    """Quantizes the operands of the backward GEMMs of quantized layers.

    Args:
        format: number format of the incoming gradient; weight and activation keep theirs.
        where: a selector of layers.
        options: the format's options.

    Raises:
        ValueError: there is no such format or option.
    """

    def __init__(self, format: str, *, where: str = "linears", **options: Any) -> None:
        super().__init__()
        self.where = where
        self.gradient = get_format(format, **options)

    @override
    def declare(self, plan: PrecisionPlan) -> None:
        plan.quantize(self.where, by=self.handle, backward="quantized", gradient=self.gradient)
