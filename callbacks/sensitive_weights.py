"""Sensitive weights: layers whose quantization costs most stay in BF16.

Which they are depends on the model; "The 4-bitter Lesson" found shared experts worth keeping.
"""

from typing_extensions import override

from callbacks.base import PrecisionCallback
from lightning_qrl.precision import PrecisionPlan


class SensitiveWeights(PrecisionCallback):
    """Keeps the selected layers in BF16.

    Args:
        select: a named predicate or a glob on full module names, or several.

    Raises:
        ValueError: the list is empty.
    """

    def __init__(self, select: str | list[str]) -> None:
        super().__init__()
        self.select = [select] if isinstance(select, str) else select
        if not self.select:
            raise ValueError("select names no layer; leave the callback out instead")

    @override
    def declare(self, plan: PrecisionPlan) -> None:
        for selector in self.select:
            plan.keep(selector, by=self.handle)
