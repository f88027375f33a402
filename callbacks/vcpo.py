"""VCPO: smaller steps on samples that say less, and a baseline made for them (arXiv 2602.17616).

    lr_t = lr sqrt( min(1, ESS / base) ),    ESS = (sum w)^2 / (N sum w^2)        over the step

w is the importance ratio pi / pi_sampler of a whole completion, not truncated: `rollout_corr/
ess_seq`. Where sampler and trainer agree ESS is 1, and nothing is scaled. AdamW's decay is scaled
too, as it is by any learning rate. The baseline is `lightning_qrl.corrections.baseline`'s.

Its truncated weight of whole completions is a callback of its own; the paper's is
``truncated_importance_sampling: {level: sequence, cap: 8}``.

Deviation: on later updates on a rollout the ratio is that of the policy as it is then, where the
authors keep that of before the first update: it is what the step's gradient is estimated with.

The scaled rate stands from before the optimizer's step (so that it is logged) until right after it:
schedules and checkpoints never see it.
"""

from typing import Any, Literal

import lightning as L
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.base import CorrectionCallback, grpo_module
from lightning_qrl.corrections.baseline import MinimumVariance
from lightning_qrl.corrections.stack import Corrections
from lightning_qrl.metrics import Metric


class VCPO(CorrectionCallback):
    """Scales the learning rate by the effective sample size, and minimizes the variance.

    Args:
        base: share of effective samples from which the learning rate is what it was, above 0 to 1;
            the paper has 1, and 0.55 for several turns.
        rule: ``sqrt``, or ``linear`` in the effective sample size.
        baseline: whether advantages get the baseline of least variance.

    Raises:
        ValueError: an argument is out of range.
    """

    single = True

    def __init__(
        self,
        base: float = 1.0,
        rule: Literal["sqrt", "linear"] = "sqrt",
        baseline: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < base <= 1:
            raise ValueError(f"base must be above 0 and at most 1, got {base}")
        if rule not in ("sqrt", "linear"):
            raise ValueError(f"rule must be sqrt or linear, got {rule!r}")
        self.base, self.rule, self.baseline = base, rule, baseline
        self._rates: list[float] = []  # of the parameter groups, while they are scaled
        self._hooks: list[RemovableHandle] = []

    @override
    def correct(self, corrections: Corrections) -> None:
        if self.baseline:
            corrections.add(MinimumVariance(), by=self.handle)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_train_end(trainer, pl_module)  # if another training was broken off
        self._hooks = [o.register_step_post_hook(self._restore) for o in trainer.optimizers]

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        metrics = grpo_module(pl_module, self).step_metrics
        scale = self.scale(metrics.so_far("rollout_corr/ess_seq"))
        metrics.add({"rollout_corr/vcpo_lr_scale": Metric("mean", scale)})
        # FP16 skips a step whose gradients overflow, with the hook; the schedule then sets the
        # rates anew, and these are what is kept here.
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= scale

    def scale(self, ess: float) -> float:
        """The factor for an effective sample size, 0 to 1; where no sample counts there is none."""
        share = min(1.0, ess / self.base) if ess else 1.0
        return float(share**0.5) if self.rule == "sqrt" else share

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
