"""Quantization monitor: what the weights lose to their format, while they are trained.

For the weights that the plan quantizes, each in its own format, over all of these layers:

    quant/weight/sqnr_db/mean|worst           quant/weight/relative_error/mean|worst
    quant/weight/underflow/mean|worst         quant/weight/saturated/mean|worst
    quant/weight/share/scale|deadzone|grid|cross    of the squared error of all of them together

`lightning_qrl.analysis.quantization_error` defines each. The worst layer is the one that loses
most. A rising underflow says that weights sink below the smallest step; an error that grows while
the shares stand still, that they spread within their blocks.
"""

import math
from collections.abc import Sequence

import lightning as L
from typing_extensions import override

from callbacks.base import StepCallback, policy_module
from lightning_qrl.analysis.quantization_error import QuantizationError, pool, weight_error
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.precision.groups import weight_of


class QuantizationMonitor(StepCallback):
    """Logs the quantization error of the weights before the first step and every N steps.

    Args:
        every_n_steps: optimizer steps between two measurements.

    Raises:
        ValueError: the argument is out of range.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        super().__init__(every_n_steps)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        module = policy_module(pl_module, self)
        if trainer.global_step == 0:
            self._measure(trainer, module, 0)

    @override
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        if self.due(step):
            self._measure(trainer, policy_module(pl_module, self), step)

    def _measure(self, trainer: L.Trainer, module: PolicyModule, step: int) -> None:
        if trainer.logger is None or not trainer.is_global_zero:
            return
        errors = weight_errors(module)
        if errors:
            trainer.logger.log_metrics(aggregate(errors), step=step)


def weight_errors(module: PolicyModule) -> list[QuantizationError]:
    """The error of every weight that is quantized in training."""
    formats = {row.layer: row.train.weight for row in module.plan.table() if row.train is not None}
    return [
        weight_error(weight_of(module.model, layer), format)
        for layer, format in formats.items()
        if format is not None and format.bits < 16
    ]


def aggregate(errors: Sequence[QuantizationError]) -> dict[str, float]:
    """The metrics of some layers; what is infinite (a layer without any error) is left out."""
    shares = pool(errors).shares
    values = {f"share/{name}": shares[name] for name in ("scale", "deadzone", "grid")}
    values["share/cross"] = sum(share for name, share in shares.items() if "_" in name)
    for name, worst, each in (
        ("sqnr_db", min, [error.sqnr_db for error in errors]),
        ("relative_error", max, [error.relative_error for error in errors]),
        ("underflow", max, [error.fraction("underflowed") for error in errors]),
        ("saturated", max, [error.fraction("saturated") for error in errors]),
    ):
        values |= {f"{name}/mean": sum(each) / len(each), f"{name}/worst": worst(each)}
    return {f"quant/weight/{name}": v for name, v in values.items() if math.isfinite(v)}
