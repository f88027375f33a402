"""Update size: how far an optimizer step moves the weights (Andy Jones's step-size statistics).

For one optimizer step, weight decay, clipping and all, with w before and w' after it:

    train/update_size/all               RMS(w' - w) / RMS(w) over all trainable weights
    train/update_size/quantized         the same over weights that the plan quantizes
    train/update_size/not_quantized     the same over the others
    train/update_size/bf16_unchanged    share of trainable weights with bf16(w') = bf16(w)

A change of less than half the distance to the next BF16 number leaves most BF16 weights bit for bit
what they were ("The Path Not Taken", arXiv 2511.08567): a sampler that reads BF16 does not see it.
Measuring costs a copy of the weights, held during the step that is measured.
"""

import math

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.base import StepCallback, policy_module
from lightning_qrl.policy_module import PolicyModule


class UpdateSize(StepCallback):
    """Logs the relative size of every Nth optimizer step.

    Args:
        every_n_steps: optimizer steps between two that are measured.

    Raises:
        ValueError: the argument is out of range.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        super().__init__(every_n_steps)
        self._before: dict[str, Tensor] = {}

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        if self.due(trainer.global_step + 1) and trainer.is_global_zero:
            model = policy_module(pl_module, self).model
            self._before = {
                name: weight.detach().clone()
                for name, weight in model.named_parameters()
                if weight.requires_grad
            }

    @override
    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        if self._before and trainer.logger is not None:
            sizes = update_sizes(policy_module(pl_module, self), self._before)
            logged = {f"train/update_size/{name}": size for name, size in sizes.items()}
            trainer.logger.log_metrics(logged, step=step)
        self._before = {}


@torch.no_grad()
def update_sizes(module: PolicyModule, before: dict[str, Tensor]) -> dict[str, float]:
    """The metrics, without their prefix; a group without weights, or of zeros only, is left out.

    Args:
        module: its weights are those after the step.
        before: the trainable weights before it, by name.
    """
    model = module.model
    rows = [row.parameter for row in module.plan.table() if row.quantized]
    quantized = {id(model.get_parameter(name)) for name in rows}  # a tied weight has other names
    squares = {"quantized": [0.0, 0.0], "not_quantized": [0.0, 0.0]}
    unchanged = elements = 0
    for name, old in before.items():
        new = model.get_parameter(name)
        group = squares["quantized" if id(new) in quantized else "not_quantized"]
        group[0] += float(torch.linalg.vector_norm(new - old)) ** 2
        group[1] += float(torch.linalg.vector_norm(old)) ** 2
        unchanged += int((new.bfloat16() == old.bfloat16()).sum())
        elements += old.numel()
    squares["all"] = [sum(each) for each in zip(*squares.values(), strict=True)]
    sizes = {name: math.sqrt(new / old) for name, (new, old) in squares.items() if old}
    return sizes | {"bf16_unchanged": unchanged / elements}
