"""Non-finite guard: an optimizer step whose loss or gradient is not finite is not taken.

NaN, infinity, or a gradient norm above `largest_norm` is seen before the optimizer: weights,
moments and the optimizer's own count of steps stay bit for bit. Then

    stop       the run ends; the message names the step and the first layer (`analysis.nonfinite`)
    skip       the run goes on with the next step
    restore    weights and moments become those of the run's newest checkpoint when the rollout
               ends; steps, learning rate and data are not turned back

    train/nonfinite_steps    such steps since the run began; not with ``stop``

Under loss scaling an infinite gradient is the scaler's to act on. All ranks decide alike.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from callbacks.base import StepCallback, check_at_least_1, policy_module
from lightning_qrl.errors import UserError
from lightning_qrl.launch.checkpoints import last_good
from lightning_qrl.launch.divergence import checkpoints_of, describe, diverges, saves, take_over
from lightning_qrl.policy_module import PolicyModule

OnNonfinite = Literal["stop", "skip", "restore"]


class NonfiniteGuard(StepCallback):
    """Keeps what is not finite out of the weights.

    Args:
        on_nonfinite: what to do then.
        largest_norm: a gradient norm, before clipping, above which a step is treated alike.
        patience: so many such steps in a row end the run in any case.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        on_nonfinite: OnNonfinite = "stop",
        largest_norm: float | None = None,
        patience: int = 10,
    ) -> None:
        super().__init__(every_n_steps=1)
        check_at_least_1(patience=patience)
        if largest_norm is not None and not 0 < largest_norm < float("inf"):
            raise ValueError(f"largest_norm must be above 0 and finite, got {largest_norm}")
        self.on_nonfinite, self.patience = on_nonfinite, patience
        self.largest_norm = float("inf") if largest_norm is None else largest_norm
        self._count = self._in_a_row = 0  # steps that were not taken
        self._loss: Tensor | float = 0.0  # summed over the step's micro-batches
        self._batches: list[tuple[Any, ...]] = []  # with their indices
        self._restores: Path | None = None

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Raise UserError where there will be nothing to restore."""
        if self.on_nonfinite == "restore" and not saves(trainer):
            raise UserError("on_nonfinite=restore needs a ModelCheckpoint among the callbacks")

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.check_trainer(trainer)
        module = policy_module(pl_module, self)
        module.may_step = partial(self._may_step, trainer, module)

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self._batches.append(batch)

    @override
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._loss = self._loss + loss.detach()

    def _may_step(self, trainer: L.Trainer, module: PolicyModule) -> bool:
        loss, self._loss = float(self._loss), 0.0
        if self._restores is not None:
            return False  # until the rollout ends
        if not diverges(trainer, module, loss, self.largest_norm):
            self._in_a_row = 0
            return True
        self._count, self._in_a_row = self._count + 1, self._in_a_row + 1
        self._act(trainer, describe(module, loss, self._batches))
        return False

    def _act(self, trainer: L.Trainer, what: str) -> None:
        files, said = checkpoints_of(trainer), f"step {trainer.global_step + 1}: {what}"
        ends = self.on_nonfinite == "stop" or self._in_a_row >= self.patience
        if ends or (self.on_nonfinite == "restore" and not files):
            raise UserError(f"nonfinite_guard: {said}; {last_good(files)}; lower optimizer.lr")
        self._restores = files[0] if self.on_nonfinite == "restore" else None
        then = f"{files[0]} is restored, steps count on" if self._restores else "skipped"
        rank_zero_only(print)(f"note: {said}; {then}", flush=True)

    @override
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        self._batches = []
        if self.on_nonfinite != "stop" and trainer.logger is not None:
            trainer.logger.log_metrics({"train/nonfinite_steps": float(self._count)}, step=step)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._restores is not None:
            take_over(trainer, self._restores)
            self._restores = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"counts": (self._count, self._in_a_row)} if self._count else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._count, self._in_a_row = state_dict["counts"]
