"""Gradient noise scale: how many completions a step should average (`analysis.noise_scale`).

    train/gradient_noise_scale      completions; tr(Sigma) / |G|^2 of the two below
    train/gradient_noise/signal     |G|^2: squared norm of the true gradient, as estimated
    train/gradient_noise/noise      tr(Sigma): variance of a single completion's gradient

It compares the gradient of a step, before it is clipped, with those of its micro-batches, of all
ranks. A hook sees each of them before they are added up; the cost is one more norm a micro-batch.

Completions of one group are no independent samples: they share a prompt and a baseline. The scale
is right where a micro-batch holds whole groups (`prompts_per_rollout` divides by
`accumulate_grad_batches`, one minibatch); where micro-batches cut groups, it is off by what their
parts have in common. Weights must be whole on every rank: one device, or DDP.
"""

from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.base import policy_module
from lightning_qrl.analysis.noise_scale import GradientNoise, estimate
from lightning_qrl.errors import UserError
from lightning_qrl.metrics import Metric, Tally


class GradientNoiseScale(L.Callback):
    """Logs the gradient noise scale at every step; nothing while no signal stands out.

    Args:
        decay: of the moving averages, what remains of older steps; 0.95 averages some 20 steps.

    Raises:
        ValueError: it is not in [0, 1).
    """

    instrument = True

    def __init__(self, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self._average, self._tally = GradientNoise(), Tally()  # the tally is of one step
        self._squares: Tensor | float = 0.0  # |gradient|^2 of this step's micro-batches, summed
        self._hooks: list[RemovableHandle] = []

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Raise UserError where a step has no parts to compare."""
        if trainer.accumulate_grad_batches < 2:
            raise UserError(
                "the gradient noise scale compares micro-batches with their step; "
                "set trainer.accumulate_grad_batches to at least 2"
            )

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.check_trainer(trainer)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_train_end(trainer, pl_module)  # if another training was broken off
        self._tally, self._squares = Tally(), 0.0
        weights = (p for p in policy_module(pl_module, self).parameters() if p.requires_grad)
        self._hooks = [w.register_hook(self._see) for w in weights]  # type: ignore[no-untyped-call]

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, gradient: Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
        self._squares = self._squares + norm.square()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        counted = float(batch.mask_BS.any(dim=1).sum())
        self._tally.add({"samples": Metric("sum", counted), "squares": Metric("sum", counted**2)})

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of FP16; grad is unscaled
        factor = trainer.world_size * (1.0 if scaler is None else scaler.get_scale())
        self._tally.add({"parts": Metric("sum", float(self._squares) / factor**2)})
        self._squares = 0.0
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        whole = float(torch.nn.utils.get_total_norm(grads)) ** 2
        found = estimate(whole, **self._tally.flush())
        if found is None:
            return
        noise = self._average = self._average.updated(*found, self.decay)
        values = {"gradient_noise/signal": noise.signal, "gradient_noise/noise": noise.noise}
        if noise.scale is not None:
            values["gradient_noise_scale"] = noise.scale
        if trainer.logger is not None:
            logged = {f"train/{name}": value for name, value in values.items()}
            trainer.logger.log_metrics(logged, step=trainer.global_step + 1)

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(decay=self.decay)

    @override
    def state_dict(self) -> dict[str, Any]:
        return asdict(self._average)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = GradientNoise(**state_dict)
