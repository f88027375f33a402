"""Sampled completions: a few of them with their rewards, as a table in MLflow.

A rising reward says little before one has read what is rewarded.
"""

from typing import Any

import lightning as L
from typing_extensions import override

from lightning_qrl.errors import UserError
from lightning_qrl.policy_module import PolicyModule

COLUMNS = ("step", "split", "prompt", "completion", "reward", "version")


class SampledCompletions(L.Callback):
    """Logs the table ``completions.json``, from rollouts and from held-out evaluations.

    Args:
        every_n_steps: optimizer steps between two looks; the first and the last step are looked at
            in any case.
        count: completions of each split a look.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, every_n_steps: int = 20, count: int = 8) -> None:
        if every_n_steps < 1 or count < 1:
            raise ValueError(
                f"every_n_steps and count must be at least 1, got {every_n_steps} and {count}"
            )
        self.every_n_steps = every_n_steps
        self.count = count
        self._looked_at = 0

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        due = step % self.every_n_steps == 0 or step in (1, trainer.max_steps)
        if not due or step == self._looked_at:
            return
        self._looked_at = step
        if not isinstance(pl_module, PolicyModule):
            raise UserError("sampled_completions: needs a PolicyModule")
        rows = [
            (step, split, *sample)
            for split, samples in sorted(pl_module.samples.items())
            for sample in samples[:: max(1, len(samples) // self.count)][: self.count]
            if split == "train" or sample.version == step  # an older evaluation was shown before
        ]
        log_table = getattr(trainer.logger, "log_table", None)
        if log_table is not None and rows:
            log_table(dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)), "completions.json")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"looked_at": self._looked_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._looked_at = state_dict["looked_at"]
