"""Which layer computes in what: selectors, the plan, and the quantized linear layer."""

from lightning_qrl.precision.linear import LinearPrecision, QuantLinear
from lightning_qrl.precision.plan import PrecisionPlan
from lightning_qrl.precision.resolve import Row

__all__ = ["LinearPrecision", "PrecisionPlan", "QuantLinear", "Row"]
