"""When training diverges: saying where, and going back to the run's newest checkpoint."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from lightning_qrl.analysis.nonfinite import (
    first_nonfinite_tensor,
    largest_gradient,
    nonfinite_gradient,
)
from lightning_qrl.errors import UserError
from lightning_qrl.launch.checkpoints import last_good, newest_first, read_checkpoint, read_sound
from lightning_qrl.policy_module import PolicyModule

OnNonfinite = Literal["stop", "skip", "restore"]


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


def describe(
    trainer: L.Trainer, module: PolicyModule, loss: float, batches: Sequence[tuple[Any, ...]]
) -> str:
    """What is wrong with an optimizer step that is not to be taken, and in which layer first.

    Args:
        trainer: knows which step it is.
        module: its gradients are those of the step.
        loss: of the step.
        batches: the step's micro-batches with their indices.
    """
    step = f"step {trainer.global_step + 1}"
    if math.isfinite(loss) and math.isfinite(module.grad_norm):
        most = largest_gradient(module.model)
        return (
            f"{step}: the gradient's norm is {module.grad_norm:.3g}, {most} has the largest share"
        )
    what = "gradient" if math.isfinite(loss) else "loss"
    first = module.first_nonfinite(batches)
    if first is None:  # computed again it is finite: a callback, another rank, or a sum did it
        bad = nonfinite_gradient(module.model)
        first = "another rank, or a sum over micro-batches" if bad is None else f"that of {bad}"
    return f"{step}: the {what} is not finite, first {first}"


def check_weights(trainer: L.Trainer, module: PolicyModule) -> None:
    """Raise UserError where weights are not finite and nobody mends them."""
    bad = first_nonfinite_tensor(module.model.named_parameters())
    if bad is None:
        return
    what = f"the weights are not finite after {trainer.global_step} optimizer steps, first {bad}"
    if not module.mends(what):
        good = last_good(sound_checkpoint(trainer)[0])
        raise UserError(f"{what}: training has diverged; {good}; lower optimizer.lr")


def check_saves(trainer: L.Trainer) -> None:
    """Raise UserError where there will be nothing to restore."""
    if not any(isinstance(c, ModelCheckpoint) for c in trainer.checkpoint_callbacks):
        raise UserError("on_nonfinite=restore needs a ModelCheckpoint among the callbacks")


def checkpoints_of(trainer: L.Trainer) -> list[Path]:
    """The checkpoints of the run in progress, the newest first."""
    savers = (c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint))
    folders = {Path(saver.dirpath) for saver in savers if saver.dirpath}
    files = [file for folder in folders for file in newest_first(folder)]
    return sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)


def sound_checkpoint(trainer: L.Trainer) -> tuple[Path | None, list[str]]:
    """The run's newest checkpoint that can be gone on from, and why not from newer ones."""
    passed_over = []
    for file in checkpoints_of(trainer):
        try:
            read_sound(file)
        except UserError as error:
            passed_over.append(str(error))
        else:
            return file, passed_over
    return None, passed_over


def act(trainer: L.Trainer, what: str, on_nonfinite: OnNonfinite) -> Path | None:
    """Say what is done about a step that is not to be taken.

    Args:
        trainer: its run's checkpoints are looked at.
        what: is wrong, and in which step.
        on_nonfinite: what is wanted.

    Returns:
        The checkpoint to restore, if that is wanted.

    Raises:
        UserError: the run ends: that is wanted, or there is no sound checkpoint.
    """
    file, passed_over = (None, []) if on_nonfinite == "skip" else sound_checkpoint(trainer)
    if on_nonfinite == "stop" or (on_nonfinite == "restore" and file is None):
        said = "; ".join([what, *passed_over, last_good(file)])
        raise UserError(f"nonfinite_guard: {said}; lower optimizer.lr")
    done = "skipped" if file is None else f"{file} is restored, steps count on"
    rank_zero_only(print)(f"note: {'; '.join([what, *passed_over, done])}", flush=True)
    return file


def take_over(trainer: L.Trainer, file: Path | None) -> None:
    """Load weights and moments of a checkpoint, and nothing else, in the midst of training.

    Args:
        trainer: its steps and the learning rate that the schedule has reached stay.
        file: the checkpoint; None for nothing to load.

    Raises:
        UserError: it is damaged, or of another run.
    """
    if file is None:
        return
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
