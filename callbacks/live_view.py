"""Live view: progress, reward and the health of the run; plain lines where there is no terminal."""

import time
from typing import Any

import lightning as L
from rich.console import Console
from rich.live import Live
from typing_extensions import override

from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.reports.live import Progress, panel, plain_line


class LiveView(L.Callback):
    """Shows a run while it goes.

    Args:
        every_n_steps: optimizer steps between two plain lines (a terminal is redrawn every step).

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._live: Live | None = None
        self._rewards: list[float] = []
        self._began, self._first_step, self._shown = 0.0, 0, 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter()
        self._first_step = self._shown = trainer.global_step
        console = Console()
        if trainer.is_global_zero and isinstance(pl_module, PolicyModule):
            print(pl_module.plan.summary(), flush=True)
        if trainer.is_global_zero and console.is_terminal:
            self._live = Live(console=console, refresh_per_second=4)
            self._live.start()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        step = trainer.global_step
        if not trainer.is_global_zero or metrics.get("step") != step or step == self._shown:
            return  # in the middle of an optimizer step
        self._shown = step
        if "train/reward" in metrics:
            self._rewards.append(metrics["train/reward"])
        progress = self._progress(trainer, step, metrics)
        if self._live is not None:
            self._live.update(panel(progress))
        elif step % self.every_n_steps == 0 or step == progress.total:
            print(plain_line(progress), flush=True)

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
