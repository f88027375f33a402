"""Launching a run: rehearse, record, train, save.

Everything that can be wrong with a recipe is found before anything is written: the objects are
built and the plan is committed to the architecture on the meta device (`rehearse`), the output
folder and the tracking server are tried, and only then a run exists.
"""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from transformers import PreTrainedModel

import lightning_qrl
from lightning_qrl.arguments import REJECTED, make
from lightning_qrl.build import Run, build
from lightning_qrl.corrections.stack import Corrections, Corrects
from lightning_qrl.data import RolloutData
from lightning_qrl.errors import UserError
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.launch.origin import Origin, check_origin, find_origin, same_run
from lightning_qrl.launch.process import INTERRUPTED, TERMINATED, quiet, sigterm_exits, undisturbed
from lightning_qrl.policy_module import PRECISIONS, PolicyModule
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.precision.backends import find_chip
from lightning_qrl.precision.plan import Declares
from lightning_qrl.recipe import Recipe
from lightning_qrl.reports.plan import plan_columns, plan_text
from lightning_qrl.tracking import MLflowRun, Status, git_tags

__all__ = ["Origin", "Outcome", "check", "find_origin", "launch", "rehearse"]


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        evaluations: held-out metrics by the number of optimizer steps.
        plan: one line on what was quantized.
        folder: checkpoints and the trained policy.
        run: the run in MLflow.
        status: how it ended.
        exit_code: what a process that ran it exits with; as of a shell, 130 when interrupted.
    """

    evaluations: dict[int, dict[str, float]]
    plan: str
    folder: Path
    run: MLflowRun
    status: Status
    exit_code: int


def rehearse(run: Run) -> PrecisionPlan:
    """The committed plan of a run, worked out on the meta device, where the optimizer is tried too.

    Raises:
        UserError: a selector matches nothing, two callbacks disagree, there is no such schedule.
    """
    plan = PrecisionPlan()
    for callback in run.callbacks.values():
        if isinstance(callback, Declares):
            callback.declare(plan)
    skeleton = run.module.policy.skeleton()
    try:
        plan.commit(skeleton, find_chip(str(run.trainer_args.get("accelerator", "auto"))))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"policy {run.module.policy.name}: {error}") from None
    try:
        settings, steps = run.module.optimizer_settings, run.trainer_args["max_steps"]
        settings.build(skeleton, frozenset(), steps)
    except REJECTED as error:
        raise UserError(f"optimizer: {error}") from None
    _rehearse_corrections(run)
    for key, callback in run.callbacks.items():
        if isinstance(callback, ChecksPolicy):
            try:
                callback.check_policy(run.module, skeleton)
            except UserError as error:
                raise UserError(f"callbacks.{key}: {error}") from None
    return plan


def _rehearse_corrections(run: Run) -> None:
    """Find corrections that undo each other, or that nothing has a use for."""
    correcting = {key: c for key, c in run.callbacks.items() if isinstance(c, Corrects)}
    if correcting and not isinstance(run.module, GRPOModule):
        raise UserError(f"callbacks.{next(iter(correcting))}: only GRPO has samples to correct")
    if isinstance(run.module, GRPOModule) and isinstance(run.data, RolloutData):
        corrections = Corrections()
        for callback in correcting.values():
            callback.correct(corrections)
        regime = run.data.regime()
        corrections.check(run.module.loss, regime.updates, regime.whole_groups)
        corrections.check_engine(run.module.engine)


def check(
    recipe: Recipe, origin: Origin | None = None
) -> tuple[Run, PrecisionPlan, MLflowRun, L.Trainer]:
    """Build all that a run needs, and write nothing.

    Raises:
        UserError: the recipe or the checkpoint is at fault, or does not fit this machine.
    """
    run = build(recipe)
    plan = rehearse(run)
    if origin is not None:
        check_origin(origin, run)
    record = _make_record(recipe)
    with quiet():
        trainer = _make_trainer(run, record)
    if trainer.precision not in PRECISIONS:
        message = f"expected one of {', '.join(PRECISIONS)}, got {trainer.precision}"
        raise recipe.error("trainer.precision", message)
    for key, callback in run.callbacks.items():
        if isinstance(callback, ChecksTrainer):
            try:
                callback.check_trainer(trainer)
            except UserError as error:
                raise recipe.error(f"callbacks.{key}", str(error)) from None
    return run, plan, record, trainer


def launch(recipe: Recipe, origin: Origin | None = None) -> Outcome:
    """Train by a recipe, from the start or from a checkpoint.

    Args:
        recipe: what to do.
        origin: continue from here; in the same MLflow run if the recipe is the one that wrote it,
            save for `CONTINUES`.

    Raises:
        UserError: the recipe, the folder, the server or the checkpoint is at fault.
    """
    run, plan, record, trainer = check(recipe, origin)
    status: Status = "FAILED"
    exit_code = 1
    try:
        with quiet(), sigterm_exits():
            _start(record, recipe, plan, run, origin)
            _train(trainer, recipe, run, record, origin)
        status, exit_code = "FINISHED", 0
    except (KeyboardInterrupt, SystemExit) as stop:  # Lightning exits when it is interrupted
        status, exit_code = "KILLED", TERMINATED if stop.args == (TERMINATED,) else INTERRUPTED
    finally:
        with undisturbed():
            record.finish(status)
    evaluations, folder = run.module.evaluations, record.run_folder
    return Outcome(evaluations, plan.summary(), folder, record, status, exit_code)


def _train(
    trainer: L.Trainer, recipe: Recipe, run: Run, record: MLflowRun, origin: Origin | None
) -> None:
    """Train, and save the policy."""
    L.seed_everything(recipe.values.get("seed", 0), verbose=False)
    run.module.provenance = {
        "recipe": recipe.to_yaml(),
        "recipe_name": recipe.name,
        "run_id": record.run_id,
    }
    trainer.fit(run.module, run.data, ckpt_path=None if origin is None else origin.checkpoint)
    if trainer.state.status != TrainerStatus.FINISHED:
        raise KeyboardInterrupt
    if trainer.is_global_zero:
        run.module.policy.save(run.module.model, record.run_folder / "policy")


def _make_record(recipe: Recipe) -> MLflowRun:
    """The MLflow run that a recipe's section ``tracking`` describes; not started."""
    name = f"{recipe.name}-seed{recipe.values.get('seed', 0)}"
    given = {"run_name": name, **recipe.values.get("tracking", {})}
    record: MLflowRun = make(recipe, "tracking", MLflowRun, given)
    return record


def _start(
    record: MLflowRun, recipe: Recipe, plan: PrecisionPlan, run: Run, origin: Origin | None
) -> None:
    continues = origin is not None and same_run(recipe, origin)
    if origin is not None and continues and not record.resume(origin.run_id):
        continues = False
        said = f"qrl: run {origin.run_id} is not at {record.uri}; it continues there as a new run"
        print(said, file=sys.stderr)
    if not continues:
        tags = {
            "qrl.recipe": recipe.name,
            "qrl.seed": str(recipe.values.get("seed", 0)),
            "qrl.version": lightning_qrl.__version__,
            "qrl.torch": torch.__version__,
            "qrl.python": platform.python_version(),
            "qrl.policy": run.module.policy.name,
            "qrl.plan": plan.summary(),
            **git_tags(Path(lightning_qrl.__file__).parent),
        }
        if origin is not None:
            tags["qrl.resumed_from"] = origin.run_id
        record.start(recipe.flat(), tags)
    record.log_text(recipe.to_yaml(), "recipe.yaml")
    record.log_text(plan_text(plan.table()), "plan.txt")
    record.log_json(plan_columns(plan.table()), "plan.json")


def _make_trainer(run: Run, record: MLflowRun) -> L.Trainer:
    """Lightning's Trainer of a run.

    Raises:
        UserError: its arguments do not fit one another or this machine.
    """
    callbacks = list(run.callbacks.values())
    folder = str(record.root)
    args = {"enable_checkpointing": any(map(_is_checkpointing, callbacks)), **run.trainer_args}
    try:
        return L.Trainer(**args, callbacks=callbacks, logger=record, default_root_dir=folder)
    except (*REJECTED, RuntimeError) as error:
        raise UserError(f"trainer: {error}") from error


def _is_checkpointing(callback: L.Callback) -> bool:
    return isinstance(callback, L.pytorch.callbacks.Checkpoint)
