"""When training diverges: saying where, and going back to the run's newest checkpoint."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_qrl.analysis.nonfinite import largest_gradient
from lightning_qrl.errors import UserError
from lightning_qrl.launch.checkpoints import newest_first, read_checkpoint
from lightning_qrl.policy_module import PolicyModule


def diverges(trainer: L.Trainer, module: PolicyModule, loss: float, largest_norm: float) -> bool:
    """Whether an optimizer step must not be taken; all ranks get the same answer.

    Args:
        trainer: where it scales the loss, an infinite gradient is the scaler's to act on.
        module: knows the norm of the step's gradient.
        loss: of the step.
        largest_norm: above it is too large.
    """
    scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    norm = module.grad_norm
    large = norm > largest_norm if math.isfinite(norm) else not scaled
    bad = large or not math.isfinite(loss)
    return trainer.strategy.reduce_boolean_decision(bad, all=False)


def describe(module: PolicyModule, loss: float, batches: Sequence[tuple[Any, ...]]) -> str:
    """What is wrong with an optimizer step that is not to be taken, and in which layer first.

    Args:
        module: its gradients are those of the step.
        loss: of the step.
        batches: the step's micro-batches with their indices.
    """
    if math.isfinite(loss) and math.isfinite(module.grad_norm):
        most = largest_gradient(module.model)
        return f"the gradient's norm is {module.grad_norm:.3g}, {most} has the largest share"
    what = "gradient" if math.isfinite(loss) else "loss"
    first = module.first_nonfinite(batches) or "another rank, or a sum over micro-batches"
    return f"the {what} is not finite, first {first}"


def saves(trainer: L.Trainer) -> bool:
    """Whether a callback of a trainer saves checkpoints as it goes."""
    return any(isinstance(c, ModelCheckpoint) for c in trainer.checkpoint_callbacks)


def checkpoints_of(trainer: L.Trainer) -> list[Path]:
    """The checkpoints of the run in progress, the newest first."""
    savers = (c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint))
    folders = dict.fromkeys(Path(saver.dirpath) for saver in savers if saver.dirpath)
    return [file for folder in folders for file in newest_first(folder)]


def take_over(trainer: L.Trainer, file: Path) -> None:
    """Load weights and moments of a checkpoint, and nothing else, in the midst of training.

    Args:
        trainer: its steps and the learning rate that the schedule has reached stay.
        file: the checkpoint.

    Raises:
        UserError: it is damaged, or of another run.
    """
    saved, module = read_checkpoint(file), trainer.lightning_module
    wrote = saved.get("lightning_qrl", {}).get("run_id")
    if isinstance(module, PolicyModule) and wrote != module.provenance.get("run_id"):
        raise UserError(f"checkpoint {file} is of another run; give each its own folder")
    rates = [group["lr"] for o in trainer.optimizers for group in o.param_groups]
    trainer.strategy.load_model_state_dict(saved)
    trainer.strategy.load_optimizer_state_dict(saved)
    groups = [group for o in trainer.optimizers for group in o.param_groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
