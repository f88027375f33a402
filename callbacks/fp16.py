"""FP16: trainer and sampler in FP16, with dynamic loss scaling (Qi et al., arXiv 2510.26788).

FP16 has 3 bits of precision more than BF16, so sampler and trainer differ less: the paper measures
a mismatch about 24 times smaller. What it lacks is range, which `loss_scaling` makes up for.

Every GEMM of the linear layers takes FP16 operands, forward and backward, on both sides: weights,
activations and the incoming gradient are rounded to FP16, where values beyond 65504 are infinite
and those below 3e-8 are 0. Sums, the operations in between and the master weights are FP32. As in
`bf16.yaml`, which it is compared with, embeddings, head and routers are left alone.

    train/loss_scale       S, of the next step
    train/skipped_steps    steps that were skipped for an overflow since the run began

A skipped step counts in `global_step` all the same. It logs what it saw: an infinite gradient norm.
"""

from functools import partial

import lightning as L
from lightning.pytorch.plugins.precision import Precision
from typing_extensions import override

from callbacks.base import PrecisionCallback, StepCallback
from lightning_qrl.errors import UserError
from lightning_qrl.formats import get_format
from lightning_qrl.loss_scaling import LossScaling
from lightning_qrl.precision import PrecisionPlan


class FP16(PrecisionCallback, StepCallback):
    """Computes linear layers in FP16 and scales the loss.

    Args:
        where: a selector of layers.
        initial_scale: of the loss at the start; a power of two, 1 or larger.
        growth_interval: steps in a row without overflow after which the scale doubles.

    Raises:
        ValueError: an argument is out of range.
    """

    single = True
    instrument = False

    def __init__(
        self,
        where: str = "linears",
        *,
        initial_scale: float = 2.0**16,
        growth_interval: int = 400,
    ) -> None:
        PrecisionCallback.__init__(self)
        StepCallback.__init__(self, every_n_steps=1)
        self.where = where
        self.make_scaling = partial(LossScaling, initial_scale, growth_interval)
        self.scaling = self.make_scaling()

    @override
    def declare(self, plan: PrecisionPlan) -> None:
        fp16 = get_format("fp16")
        plan.quantize(
            self.where,
            by=self.handle,
            weight=fp16,
            activation=fp16,
            gradient=fp16,
            backward="quantized",
        )

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Raise UserError where the trainer rounds or scales by itself."""
        if type(trainer.precision_plugin) not in (Precision, LossScaling):
            name = type(trainer.precision_plugin).__name__
            raise UserError(
                "emulates FP16 on FP32 tensors and scales the loss itself, which "
                f"trainer.precision={trainer.precision} ({name}) would do otherwise or once more; "
                "set trainer.precision to 32-true"
            )

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.check_trainer(trainer)
        super().setup(trainer, pl_module, stage)
        trainer.strategy.precision_plugin = self.scaling = self.make_scaling()

    @override
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        if trainer.logger is not None:
            values = {"loss_scale": self.scaling.scale, "skipped_steps": self.scaling.skipped}
            logged = {f"train/{name}": float(value) for name, value in values.items()}
            trainer.logger.log_metrics(logged, step=step)
