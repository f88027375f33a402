"""AdamW with a learning-rate schedule, and its state addressed by parameter name.

Weight decay splits the parameters into two groups, and which weights decay depends on the callback
stack. Saved state is matched to parameters by name when it is loaded, so a checkpoint written under
one stack loads under any other.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from lightning_qrl.plugins import nearest

GIVEN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) and its schedule.

    Attributes:
        lr: peak learning rate.
        weight_decay: decoupled weight decay of matrices; biases and norms never decay.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        schedule: a schedule of transformers, e.g. ``constant_with_warmup``, ``cosine``.
        warmup_steps: optimizer steps in which the learning rate rises from 0.
        schedule_args: further arguments of the schedule, e.g. ``{min_lr_rate: 0.1}``.
    """

    lr: float = 1e-4
    weight_decay: float = 0.0
    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: str = "constant_with_warmup"
    warmup_steps: int = 0
    schedule_args: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, got {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {self.weight_decay}")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps must be above 0 and finite, got {self.eps}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {list(self.betas)}")
        _check_schedule(self.schedule, self.schedule_args or {})
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")

    def build(
        self, model: nn.Module, no_decay: frozenset[str], total_steps: int
    ) -> tuple[AdamW, LRScheduler]:
        """The optimizer of a model's parameters, and its schedule.

        Args:
            model: its trainable parameters are optimized.
            no_decay: names of matrices that are exempt from weight decay.
            total_steps: optimizer steps of the run, for schedules that end.
        """
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        exempt = {n for n, p in named if n in no_decay or p.ndim < 2}
        groups: list[dict[str, Any]] = [
            {"params": [(n, p) for n, p in named if n not in exempt]},
            {"params": [(n, p) for n, p in named if n in exempt], "weight_decay": 0.0},
        ]
        for group in groups:
            group["param_names"] = []  # torch fills it in, but not where a group is empty
        b1, b2 = self.betas
        optimizer = AdamW(
            groups,
            lr=self.lr,
            betas=(b1, b2),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )
        optimizer.register_load_state_dict_pre_hook(regroup)
        schedule = get_scheduler(
            self.schedule,
            optimizer,
            num_warmup_steps=self.warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=self.schedule_args,
        )
        return optimizer, schedule


def _check_schedule(schedule: str, arguments: Mapping[str, float]) -> None:
    """Some schedules ignore arguments that they do not know: refuse these."""
    functions = cast(Mapping[SchedulerType, Callable[..., Any]], TYPE_TO_SCHEDULER_FUNCTION)
    schedules = {kind.value: list(inspect.signature(f).parameters) for kind, f in functions.items()}
    by_step = [name for name, parameters in schedules.items() if "kwargs" not in parameters]
    if schedule not in by_step:  # the others change the rate by a metric
        raise ValueError(f"there is no schedule {schedule} by step; {nearest(schedule, by_step)}")
    known = [name for name in schedules[schedule] if name not in GIVEN]
    for name in arguments:
        if name not in known:
            raise ValueError(f"schedule {schedule} has no argument {name}; {nearest(name, known)}")


def regroup(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Lay a saved optimizer state out for the parameter groups of another optimizer.

    Args:
        optimizer: the optimizer that loads it; its own groups and settings stay, save that its
            learning rate is where the schedule has moved it.
        saved: `state_dict` of an optimizer over the same parameters, grouped in any way.

    Returns:
        A state dict in the order of the optimizer's own groups.
    """
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    state = {
        n: saved["state"][i] for n, i in zip(names, indices, strict=True) if i in saved["state"]
    }
    fresh: dict[str, Any] = optimizer.state_dict()
    wanted = [name for group in fresh["param_groups"] for name in group["param_names"]]
    fresh["state"] = {i: state[name] for i, name in enumerate(wanted) if name in state}
    for group, old in zip(fresh["param_groups"], saved["param_groups"], strict=True):
        own, theirs = group["initial_lr"], old["initial_lr"]
        group["lr"] = old["lr"] if own == theirs else old["lr"] * own / theirs
    return fresh
