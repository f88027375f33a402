"""Stopping a run where it can go on: at the end of a rollout phase, with a checkpoint.

A phase is one epoch of Lightning's, and only its end can be resumed. A stop that is asked for while
a run is being set up or evaluated for the first time takes effect before its first phase.

The checkpoint is written after every other callback has had the epoch's end, so that the resumed
run is bit for bit the one that was not stopped. Nothing else happens: no evaluation is added.
Where the last phase ends the run ends too, stopped or not.
"""

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from lightning_qrl.launch.checkpoints import FOLDER
from lightning_qrl.launch.process import TERMINATED, StopRequest
from lightning_qrl.tracking import MLflowRun

NAME = "stopped.ckpt"  # a later stop of the run replaces it


class StopAtPhaseEnd(Checkpoint):
    """Saves and leaves by SystemExit when a stop was asked for, on all ranks alike.

    A `Checkpoint`, because Lightning calls these last.

    Args:
        record: knows the run's folder once the run has begun.

    Attributes:
        request: what signals have asked for.
    """

    def __init__(self, record: MLflowRun) -> None:
        self.request = StopRequest()
        self._record = record

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Lightning's own handler of SIGTERM, not installed yet, would stop inside a phase.
        connector = trainer._signal_connector
        connector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._asked(trainer):
            self.request.exit_if_asked()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ends = trainer.global_step >= trainer.max_steps or trainer.should_stop
        if not ends and self._asked(trainer):
            trainer.save_checkpoint(self._record.run_folder / FOLDER / NAME)
            self.request.exit_if_asked()

    def _asked(self, trainer: L.Trainer) -> bool:
        asked = self.request.exit_code is not None
        asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked and self.request.exit_code is None:
            self.request.exit_code = TERMINATED  # another rank was
        return asked
