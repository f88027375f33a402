"""Held-out evaluation: the reward on prompts that are never trained on.

Before the first step of a run, every N optimizer steps and after the last one, one completion of
each of the same prompts is sampled with the same draws, at the temperature of training.
"""

from typing import Any

import lightning as L
from typing_extensions import override

from lightning_qrl.errors import UserError
from lightning_qrl.policy_module import PolicyModule


class HeldOutEvaluation(L.Callback):
    """Logs ``eval/reward`` and ``eval/solved``, and keeps them in the module's `evaluations`.

    Args:
        prompts: number of held-out prompts, evenly spaced over the split.
        every_n_steps: optimizer steps between two evaluations.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, prompts: int = 512, every_n_steps: int = 20) -> None:
        if prompts < 1 or every_n_steps < 1:
            raise ValueError(
                f"prompts and every_n_steps must be at least 1, got {prompts} and {every_n_steps}"
            )
        self.prompts = prompts
        self.every_n_steps = every_n_steps

    @override
    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A new run that starts from another run's checkpoint has no evaluations yet."""
        module = _policy_module(pl_module)
        wrote = checkpoint.get("lightning_qrl", {}).get("run_id")
        if wrote != module.provenance.get("run_id"):
            module.evaluations.clear()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not _policy_module(pl_module).evaluations:
            self._evaluate(trainer, pl_module)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step % self.every_n_steps == 0:
            self._evaluate(trainer, pl_module)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module, step = _policy_module(pl_module), trainer.global_step
        if step in module.evaluations:
            return
        held_out = module.task.prompts("held_out")
        stride = max(1, len(held_out) // self.prompts)
        metrics = module.evaluate(held_out[::stride][: self.prompts])
        values = {name: metric.value() for name, metric in metrics.items()}
        module.evaluations[step] = values
        if trainer.logger is not None:
            logged = {f"eval/{name}": value for name, value in values.items()}
            trainer.logger.log_metrics(logged, step=step)


def _policy_module(pl_module: L.LightningModule) -> PolicyModule:
    if not isinstance(pl_module, PolicyModule):
        raise UserError("held_out_evaluation: needs a PolicyModule")
    return pl_module
