"""What a precision callback is: it declares rules, and the module commits them."""

import re
from abc import ABC, abstractmethod

import lightning as L
from typing_extensions import override

from lightning_qrl.errors import UserError
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.precision import PrecisionPlan


class PrecisionCallback(L.Callback, ABC):
    """Declares rules of the precision plan.

    Attributes:
        handle: its key in the recipe, by which messages and the plan's table call it.
    """

    def __init__(self) -> None:
        self.handle = snake_case(type(self).__name__)

    @abstractmethod
    def declare(self, plan: PrecisionPlan) -> None:
        """Add this callback's rules; no layer exists yet."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, PolicyModule):
            raise UserError(f"{self.handle}: needs a PolicyModule, got {type(pl_module).__name__}")
        self.declare(pl_module.plan)


def snake_case(name: str) -> str:
    """``BF16Tail`` becomes ``bf16_tail``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
