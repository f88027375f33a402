"""Live view: progress, reward and the health of the run; plain lines where there is no terminal.

The plain lines are kept in MLflow too, as the artefact ``live_view.log``, terminal or not.
"""

import time
from dataclasses import replace

import lightning as L
from rich.console import Console
from rich.live import Live
from typing_extensions import override

from callbacks.base import StepCallback
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.reports.live import Progress, panel, plain_line

LOG = "live_view.log"  # artefact


class LiveView(StepCallback):
    """Shows a run while it goes.

    Args:
        every_n_steps: optimizer steps between two plain lines (a terminal is redrawn every step).

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        super().__init__(every_n_steps)
        self._live: Live | None = None
        self._rewards: list[float] = []
        self._said: set[str] = set()
        self._began, self._first_step = 0.0, 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = time.perf_counter()
        self._first_step = trainer.global_step
        console = Console()
        if trainer.is_global_zero and isinstance(pl_module, PolicyModule):
            self._say(trainer, pl_module.plan.summary())
        if trainer.is_global_zero and console.is_terminal:
            self._live = Live(console=console, refresh_per_second=4)
            self._live.start()

    @override
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        if not trainer.is_global_zero:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if "train/reward" in metrics:
            self._rewards.append(metrics["train/reward"])
        loss = getattr(pl_module, "loss", None)
        progress = self._progress(trainer, step, metrics)
        if not getattr(loss, "learns_from_rewards", True):
            progress = replace(progress, learns_from_rewards=False)
        if self._live is not None:
            self._live.update(panel(progress))
        if self.due(step) or step == progress.total:
            self._say(trainer, plain_line(progress))
        for name, explanation in progress.explained().items():
            if name not in self._said:  # a log file needs it once
                self._said.add(name)
                self._say(trainer, f"note: {explanation}")

    def _say(self, trainer: L.Trainer, line: str) -> None:
        if self._live is None:
            print(line, flush=True)
        log_line = getattr(trainer.logger, "log_line", None)
        if log_line is not None:
            log_line(line, LOG)

    def _progress(self, trainer: L.Trainer, step: int, metrics: dict[str, float]) -> Progress:
        done = step - self._first_step
        each = (time.perf_counter() - self._began) / done
        name = getattr(trainer.logger, "run_name", "training")
        left = each * (trainer.max_steps - step)
        return Progress(name, step, trainer.max_steps, left, self._rewards, metrics)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
