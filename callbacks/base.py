"""What callbacks share: they declare precision, add corrections, or act after optimizer steps."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

import lightning as L
from typing_extensions import override

from lightning_qrl.corrections.stack import Corrections
from lightning_qrl.errors import UserError
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.plugins import snake_case
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.precision import PrecisionPlan

M = TypeVar("M", bound=L.LightningModule)


class Named(L.Callback):
    """A callback that messages and tables call by its `handle`, its key in the recipe."""

    single: ClassVar[bool] = False  # two of it would undo or double each other

    def __init__(self) -> None:
        self.handle = snake_case(type(self).__name__)


class PrecisionCallback(Named, ABC):
    """Declares rules of the precision plan."""

    @abstractmethod
    def declare(self, plan: PrecisionPlan) -> None:
        """Add this callback's rules; no layer exists yet."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.declare(policy_module(pl_module, self).plan)


class CorrectionCallback(Named, ABC):
    """Adds a correction of what sampler and trainer differ in."""

    @abstractmethod
    def correct(self, corrections: Corrections) -> None:
        """Add the correction; no model exists yet."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.correct(grpo_module(pl_module, self).objective.corrections)


class StepCallback(L.Callback, ABC):
    """Acts after optimizer steps, where Lightning's hook comes after every micro-batch.

    Attributes:
        instrument: it only watches: ablations keep it in every arm.

    Args:
        every_n_steps: optimizer steps between two that are `due`.

    Raises:
        ValueError: it is less than 1.
    """

    instrument: ClassVar[bool] = True

    def __init__(self, every_n_steps: int) -> None:
        check_at_least_1(every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._last_step = 0

    @abstractmethod
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        """Called once after each optimizer step; ``step`` is how many there were."""

    def due(self, step: int) -> bool:
        """Whether ``step`` is one of every N."""
        return step % self.every_n_steps == 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self.after_step(trainer, pl_module, self._last_step)


def check_at_least_1(**given: int) -> None:
    """Raise ValueError where one of some arguments is less than 1."""
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def policy_module(pl_module: L.LightningModule, callback: L.Callback) -> PolicyModule:
    """The module as what it must be; UserError, which names the callback, if it is another."""
    return _expect(PolicyModule, pl_module, callback)


def grpo_module(pl_module: L.LightningModule, callback: L.Callback) -> GRPOModule:
    """The same for what needs GRPO."""
    return _expect(GRPOModule, pl_module, callback)


def _expect(kind: type[M], pl_module: L.LightningModule, callback: L.Callback) -> M:
    if not isinstance(pl_module, kind):
        handle = getattr(callback, "handle", snake_case(type(callback).__name__))
        raise UserError(f"{handle}: needs a {kind.__name__}, got {type(pl_module).__name__}")
    return pl_module
