"""Non-finite guard: an optimizer step whose loss or gradient is not finite is not taken.

NaN, infinity, or a gradient norm above `largest_norm` is seen before the optimizer: weights,
moments and the optimizer's own count of steps stay bit for bit. Then

    stop       the run ends; the message names the step and the first layer (`analysis.nonfinite`)
    skip       the run goes on with the next step
    restore    weights and moments become those of the run's newest sound checkpoint when the
               rollout ends; steps, learning rate and data are not turned back

    train/nonfinite_steps    steps not taken since the run began; not with ``stop``

Weights or a sampler's logits that are not finite cannot be skipped; one rank restores them at once.
Under loss scaling an infinite gradient is the scaler's to act on. All ranks decide alike.
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor
from typing_extensions import override

from callbacks.base import StepCallback, check_at_least_1, policy_module
from lightning_qrl.launch import divergence
from lightning_qrl.policy_module import PolicyModule


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
        on_nonfinite: divergence.OnNonfinite = "stop",
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
        if self.on_nonfinite == "restore":
            divergence.check_saves(trainer)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.check_trainer(trainer)
        module = policy_module(pl_module, self)
        module.may_step = partial(self._may_step, trainer, module)
        module.mends = partial(self._mends, trainer, module)

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self._batches.append(batch)

    @override
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._loss = self._loss + loss.detach()

    def _may_step(self, trainer: L.Trainer, module: PolicyModule) -> bool:
        loss, self._loss = float(self._loss), 0.0
        if self._restores is None:  # else steps are withheld until the rollout ends
            if not divergence.diverges(trainer, module, loss, self.largest_norm):
                self._in_a_row = 0
                return True
            self._act(trainer, divergence.describe(trainer, module, loss, self._batches))
        self._count += 1
        return False

    def _mends(self, trainer: L.Trainer, module: PolicyModule, what: str) -> bool:
        if self.on_nonfinite != "restore" or trainer.world_size > 1:  # one rank may see it alone
            return False
        self._act(trainer, what)
        divergence.take_over(trainer, self._restores)
        self._restores = None
        return True

    def _act(self, trainer: L.Trainer, what: str) -> None:
        self._in_a_row += 1
        kept = self.on_nonfinite if self._in_a_row < self.patience else "stop"
        self._restores = divergence.act(trainer, what, kept)

    @override
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        self._batches = []
        if self.on_nonfinite != "stop" and trainer.logger is not None:
            trainer.logger.log_metrics({"train/nonfinite_steps": float(self._count)}, step=step)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        divergence.check_weights(trainer, policy_module(pl_module, self))
        divergence.take_over(trainer, self._restores)
        self._restores = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"counts": (self._count, self._in_a_row)} if self._count else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._count, self._in_a_row = state_dict["counts"]
