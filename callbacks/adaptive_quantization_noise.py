"""Adaptive quantization noise: QeRL's noise on the sampler's norms (arXiv 2510.11696, section 3).

Quantization noise makes a policy explore, but it stands still. QeRL adds noise that fades: wherever
a projection reads what a norm wrote (query, key, value; gate and up; never output and down), the
sampler computes with

    w + Z,   Z ~ N(0, sigma^2 I)        in place of the norm's weight w

which is noise in the rows of these projections, the same for all that read one norm. Training has
K equal stages: sigma_0 = 0, then from sigma_start to sigma_end in a geometric sequence,

    sigma_k = sigma_start (sigma_end / sigma_start)^((k - 1) / (K - 2)),    k = 1 .. K - 1

That is what the authors' code does; in their paper the exponent's denominator is K - 1, so that
sigma_end is not reached by one stage. Z is drawn once for each version of the weights, as in their
code (in their paper: at each forward pass), from a seed of its own, the same on all ranks. Their
code noises every norm, and adds to what it added before where the sampler's norms are not loaded
anew; here w is saved, and put back bit for bit whatever happens, so that trainer, evaluation and
checkpoints never see Z.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning as L
import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from callbacks.base import Named, grpo_module
from lightning_qrl.errors import UserError
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.metrics import Metric
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.precision.norms import feeding_norms
from lightning_qrl.seeding import derive_seed


class AdaptiveQuantizationNoise(Named):
    """Samples rollouts with noise on the weights of norms; logs ``quant/aqn_sigma``.

    Args:
        sigma_start: standard deviation in the second stage.
        sigma_end: in the last stage.
        stages: equal parts of ``trainer.max_steps``; the first is without noise.

    Raises:
        ValueError: an argument is out of range.
    """

    single = True

    def __init__(
        self, sigma_start: float = 1e-2, sigma_end: float = 1e-4, stages: int = 10
    ) -> None:
        super().__init__()
        if not 0 < sigma_end <= sigma_start < 1:
            raise ValueError(
                "sigma_start and sigma_end must be above 0 and below 1, the end not above the "
                f"start, got {sigma_start} and {sigma_end}"
            )
        if stages < 3:
            raise ValueError(f"stages must be at least 3, got {stages}: none, start, end")
        self.sigma_start, self.sigma_end, self.stages = sigma_start, sigma_end, stages
        self._sampled_with = 0.0

    def sigma(self, step: int, max_steps: int) -> float:
        """The standard deviation after ``step`` optimizer steps of ``max_steps``."""
        stage = min(step * self.stages // max_steps, self.stages - 1)
        decay: float = (self.sigma_end / self.sigma_start) ** ((stage - 1) / (self.stages - 2))
        return self.sigma_start * decay if stage else 0.0

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Raise UserError where not every stage would have a step."""
        if trainer.max_steps < self.stages:
            steps = f"trainer.max_steps={trainer.max_steps}"
            raise UserError(f"{steps} is less than its stages={self.stages}; lower these")

    def check_policy(self, module: PolicyModule, skeleton: PreTrainedModel) -> None:
        """Raise UserError where nothing is sampled to be trained on."""
        if not isinstance(module, GRPOModule):
            raise UserError("only GRPO has rollouts to be sampled with noise; take it out")

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the first rollout is sampled before training is said to start
        module = grpo_module(pl_module, self)
        self.check_trainer(trainer)
        try:
            weights = list(feeding_norms(module.model).values())
        except ValueError as error:
            raise UserError(f"{self.handle}: {error}") from None
        if not weights:
            kind = type(module.model).__name__
            raise UserError(f"{self.handle}: no linear layer of {kind} reads what a norm wrote")
        module.around_rollouts[self.handle] = lambda: self._noise(module, weights)

    @contextmanager
    def _noise(self, module: GRPOModule, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        step = module.global_step
        self._sampled_with = sigma = self.sigma(step, module.trainer.max_steps)
        draws = torch.Generator().manual_seed(derive_seed(module.seed, "aqn", step))
        saved = [weight.detach().clone() for weight in weights]
        try:
            with torch.no_grad():
                for weight in weights:
                    weight += sigma * torch.randn(weight.shape, generator=draws).to(weight)
            yield
        finally:
            with torch.no_grad():
                for weight, before in zip(weights, saved, strict=True):
                    weight.copy_(before)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        sigma = Metric("max", self._sampled_with)
        grpo_module(pl_module, self).step_metrics.add({"quant/aqn_sigma": sigma})
