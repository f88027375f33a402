"""Rehearsing a run: what its parts say of one another, before anything is loaded or written.

The plan is committed to the architecture on the meta device, the optimizer is made for it, and the
trainer for a CPU, whatever machine the recipe is for: so any machine can check any recipe.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from transformers import PreTrainedModel

from lightning_qrl.arguments import REJECTED
from lightning_qrl.build import Run
from lightning_qrl.corrections.stack import Corrections, Corrects
from lightning_qrl.data import RolloutData
from lightning_qrl.errors import UserError, described, in_one_line
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.launch.process import quiet
from lightning_qrl.policy_module import PRECISIONS, PolicyModule
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.precision.backends import find_chip
from lightning_qrl.precision.plan import Declares

ANYWHERE: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}


@runtime_checkable
class ChecksTrainer(Protocol):
    """A callback that works with some trainers only."""

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Raise UserError where it does not work."""


@runtime_checkable
class ChecksPolicy(Protocol):
    """A callback that works with some policies only."""

    def check_policy(self, module: PolicyModule, skeleton: PreTrainedModel) -> None:
        """Raise UserError where it does not work; the skeleton is on the meta device."""


@runtime_checkable
class ReplaysRoutes(Protocol):
    """A callback that may have the sampler record which experts tokens went to."""

    replays_routes: bool


def rehearse(run: Run) -> PrecisionPlan:
    """The committed plan of a run, worked out on the meta device, where the optimizer is tried too.

    Raises:
        UserError: a selector matches nothing, two callbacks disagree, there is no such schedule.
    """
    plan = PrecisionPlan()
    for key, callback in run.callbacks.items():
        if isinstance(callback, Declares):
            with in_one_line(f"callbacks.{key}"):
                callback.declare(plan)
    policy = run.module.policy.name
    with in_one_line(f"policy {policy}"):
        skeleton = run.module.policy.skeleton()
        chip = find_chip(str(run.trainer_args.get("accelerator", "auto")))
        plan.commit(skeleton, chip)
    settings, steps = run.module.optimizer_settings, run.trainer_args["max_steps"]
    with in_one_line("optimizer"):
        settings.build(skeleton, frozenset(), steps)
    for key, callback in run.callbacks.items():
        if isinstance(callback, ChecksPolicy):
            with _of_callback(key):
                callback.check_policy(run.module, skeleton)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a CPU lacks
        trainer = make_trainer(run, **ANYWHERE, logger=False)
    check_trainer(run, trainer)
    return plan


@contextmanager
def _of_callback(key: str) -> Iterator[None]:
    """Whatever is raised inside is about a callback."""
    try:
        yield
    except Exception as error:
        raise UserError(f"callbacks.{key}: {described(error)}") from error


def make_trainer(run: Run, last: Sequence[Checkpoint] = (), **given: Any) -> L.Trainer:
    """Lightning's Trainer of a run; what is given replaces what the recipe says.

    Args:
        run: its callbacks are the Trainer's.
        last: further ones, which are called after these.
        given: arguments of the Trainer.

    Raises:
        UserError: its arguments do not fit one another or this machine.
    """
    callbacks = list(run.callbacks.values())
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    wanted = run.trainer_args.get("enable_checkpointing")
    if wanted and not saves:
        callbacks.append(ModelCheckpoint())  # as Lightning does, where it sees no other
    refused = wanted is False and saves  # by Lightning, in its words
    given["enable_checkpointing"] = not refused and bool(saves or wanted or last)
    given["callbacks"] = [*callbacks, *last]
    try:
        return L.Trainer(**{**run.trainer_args, **given})
    except REJECTED as error:
        raise UserError(f"trainer: {error}") from error
    except Exception as error:  # what a machine lacks shows in many ways
        raise UserError(f"trainer: {described(error)}") from error


def check_trainer(run: Run, trainer: L.Trainer) -> None:
    """Raise UserError where callbacks, corrections or data do not work with a trainer."""
    if trainer.precision not in PRECISIONS:
        message = f"expected one of {', '.join(PRECISIONS)}, got {trainer.precision}"
        raise UserError(f"trainer.precision: {message}")
    if isinstance(run.data, RolloutData):
        run.data.check_ranks(trainer.world_size)
    _check_corrections(run, trainer.world_size)
    for key, callback in run.callbacks.items():
        if isinstance(callback, ChecksTrainer):
            with _of_callback(key):
                callback.check_trainer(trainer)


def _check_corrections(run: Run, ranks: int) -> None:
    """Find corrections that undo each other, or that nothing has a use for."""
    correcting = [key for key, callback in run.callbacks.items() if isinstance(callback, Corrects)]
    if correcting and not isinstance(run.module, GRPOModule):
        raise UserError(f"callbacks.{correcting[0]}: only GRPO has samples to correct")
    if isinstance(run.module, GRPOModule) and isinstance(run.data, RolloutData):
        corrections, regime = corrections_of(run), run.data.regime(ranks)
        corrections.check(run.module.loss, regime.updates, regime.whole_groups)
        corrections.check_engine(run.module.engine)


def corrections_of(run: Run) -> Corrections:
    """What the callbacks of a run will correct."""
    corrections = Corrections()
    for callback in run.callbacks.values():
        if isinstance(callback, Corrects):
            callback.correct(corrections)
    return corrections


def replays_routes(run: Run) -> bool:
    """Whether a callback of a run will ask for the sampler's routes."""
    callbacks = run.callbacks.values()
    return any(c.replays_routes for c in callbacks if isinstance(c, ReplaysRoutes))
