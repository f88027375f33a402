"""Held-out evaluation: the reward on prompts that are never trained on.

Before the first step of a run, every N optimizer steps and after the last one, the same prompts are
completed with the same draws, at the temperature of training: one completion each, or as many as
the largest k of pass@k (see `analysis.pass_at_k`), which costs that many times as much.
"""

from collections.abc import Sequence
from typing import Any

import lightning as L
from typing_extensions import override

from callbacks.base import StepCallback, check_at_least_1, policy_module


class HeldOutEvaluation(StepCallback):
    """Logs ``eval/reward``, ``eval/solved`` and each ``eval/pass_at_K``.

    The module keeps them in its `evaluations`.

    Args:
        prompts: number of held-out prompts, evenly spaced over the split.
        every_n_steps: optimizer steps between two evaluations.
        pass_at: numbers k to estimate pass@k for.

    Raises:
        ValueError: an argument is out of range, or a k is given twice.
    """

    def __init__(
        self, prompts: int = 512, every_n_steps: int = 20, pass_at: Sequence[int] = ()
    ) -> None:
        check_at_least_1(prompts=prompts)
        super().__init__(every_n_steps)
        if min(pass_at, default=1) < 1 or len(set(pass_at)) < len(pass_at):
            raise ValueError(
                f"pass_at takes different numbers of completions from 1, got {list(pass_at)}"
            )
        self.prompts = prompts
        self.pass_at = tuple(pass_at)

    @override
    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A new run that starts from another run's checkpoint has no evaluations yet."""
        module = policy_module(pl_module, self)
        wrote = checkpoint.get("lightning_qrl", {}).get("run_id")
        if wrote != module.provenance.get("run_id"):
            module.evaluations.clear()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not policy_module(pl_module, self).evaluations:
            self._evaluate(trainer, pl_module)

    @override
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        if self.due(step):
            self._evaluate(trainer, pl_module)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module, step = policy_module(pl_module, self), trainer.global_step
        if step in module.evaluations:
            return
        held_out = module.task.prompts("held_out")
        stride = max(1, len(held_out) // self.prompts)
        metrics = module.evaluate(held_out[::stride][: self.prompts], self.pass_at)
        values = {name: metric.value() for name, metric in metrics.items()}
        module.evaluations[step] = values
        if trainer.logger is not None:
            logged = {f"eval/{name}": value for name, value in values.items()}
            trainer.logger.log_metrics(logged, step=step)
