"""FP32 head: the logits are computed in FP32, in the sampler as in the trainer.

The head's GEMM takes FP32 operands and gives FP32 logits whatever the rest computes in; its
gradients are FP32 too. Sampler and trainer then round hidden states differently, but no longer the
logits themselves (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786: asymptotic reward 0.52
without, 0.61 with it). On one side alone it is worse than on none, so it holds on both: an engine
that samples with layers of its own is refused.

Under trainer.precision 32-true the head is FP32 anyway: the table of `qrl plan` says so, and no
number of the run changes, so one stack serves in every precision. A callback that quantizes the
head beside it is an error. A reference (`grpo.reference`) is another model and stays as it is.
"""

import lightning as L
from typing_extensions import override

from callbacks.base import PrecisionCallback, policy_module
from lightning_qrl.errors import UserError
from lightning_qrl.precision import PrecisionPlan


class FP32LmHead(PrecisionCallback):
    """Computes the head in FP32 on both sides; a tied head stays tied.

    Args:
        where: the head's full name.
    """

    def __init__(self, where: str = "lm_head") -> None:
        super().__init__()
        self.where = where

    @override
    def declare(self, plan: PrecisionPlan) -> None:
        plan.keep(self.where, by=self.handle, at="fp32")

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        engine = policy_module(pl_module, self).engine
        if not engine.follows_plan:
            name = type(engine).__name__
            raise UserError(f"{self.handle}: engine {name} samples with a head of its own")
        super().setup(trainer, pl_module, stage)
