"""Sampled completions: a few of them with their rewards, as a table in MLflow.

A rising reward says little before one has read what is rewarded. Where a completion has no reward
(NaN), the table has an empty cell: JSON knows no NaN.
"""

import math

import lightning as L
from typing_extensions import override

from callbacks.base import StepCallback, check_at_least_1, policy_module

COLUMNS = ("step", "split", "prompt", "completion", "reward", "version")


class SampledCompletions(StepCallback):
    """Logs the table ``completions.json``, from rollouts and from held-out evaluations.

    Args:
        every_n_steps: optimizer steps between two looks; the first and the last step are looked at
            in any case.
        count: completions of each split a look.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, every_n_steps: int = 20, count: int = 8) -> None:
        super().__init__(every_n_steps)
        check_at_least_1(count=count)
        self.count = count

    @override
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        if not (self.due(step) or step in (1, trainer.max_steps)):
            return
        rows = [
            (
                step,
                split,
                s.prompt,
                s.completion,
                None if math.isnan(s.reward) else s.reward,
                s.version,
            )
            for split, samples in sorted(policy_module(pl_module, self).samples.items())
            for s in samples[:: max(1, len(samples) // self.count)][: self.count]
            if split == "train" or s.version == step  # an older evaluation was shown before
        ]
        log_table = getattr(trainer.logger, "log_table", None)
        if log_table is not None and rows:
            log_table(dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)), "completions.json")
