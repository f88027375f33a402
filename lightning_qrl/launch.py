"""Launching a run: rehearse, record, train, save.

Everything that can be wrong with a recipe is found before anything is written: the objects are
built and the plan is committed to the architecture on the meta device (`rehearse`), the output
folder and the tracking server are tried, and only then a run exists.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerStatus

import lightning_qrl
from lightning_qrl.arguments import check_arguments
from lightning_qrl.build import Run, build
from lightning_qrl.errors import UserError
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.precision.plan import Declares
from lightning_qrl.recipe import Recipe, recipe_from_yaml
from lightning_qrl.reports.plan import plan_columns, plan_text
from lightning_qrl.tracking import MLflowRun, Status, git_tags

CONTINUES = ("trainer.max_steps", "tracking.")  # what may change within one run


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run is resumed from.

    Attributes:
        checkpoint: the file.
        recipe: the recipe that wrote it.
        run_id: the MLflow run that wrote it.
    """

    checkpoint: Path
    recipe: Recipe
    run_id: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        evaluations: held-out metrics by the number of optimizer steps.
        plan: one line on what was quantized.
        folder: checkpoints and the trained policy.
        run: the run in MLflow.
        status: how it ended.
    """

    evaluations: dict[int, dict[str, float]]
    plan: str
    folder: Path
    run: MLflowRun
    status: Status


def rehearse(run: Run) -> PrecisionPlan:
    """The committed plan of a run, worked out on the meta device.

    Raises:
        UserError: a selector matches nothing, or two callbacks disagree.
    """
    plan = PrecisionPlan()
    for callback in run.callbacks.values():
        if isinstance(callback, Declares):
            callback.declare(plan)
    try:
        plan.commit(run.module.policy.skeleton())
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"policy {run.module.policy.name}: {error}") from None
    return plan


def launch(recipe: Recipe, origin: Origin | None = None) -> Outcome:
    """Train by a recipe, from the start or from a checkpoint.

    Args:
        recipe: what to do.
        origin: continue from here; in the same MLflow run if the recipe is the one that wrote it,
            save for `CONTINUES`.

    Raises:
        UserError: the recipe, the folder, the server or the checkpoint is at fault.
    """
    run = build(recipe)
    plan = rehearse(run)
    record = make_record(recipe)
    with _quiet():
        trainer = _make_trainer(run, record)
    _start(record, recipe, plan, run, origin)
    L.seed_everything(recipe.values.get("seed", 0), verbose=False)
    run.module.provenance = {
        "recipe": recipe.to_yaml(),
        "recipe_name": recipe.name,
        "run_id": record.run_id,
    }
    checkpoint = None if origin is None else origin.checkpoint
    status: Status = "FAILED"
    try:
        with _quiet():
            trainer.fit(run.module, run.data, ckpt_path=checkpoint)
        finished = trainer.state.status == TrainerStatus.FINISHED
        status = "FINISHED" if finished else "KILLED"
        if trainer.is_global_zero and finished:
            run.module.policy.save(run.module.model, record.run_folder / "policy")
    except (KeyboardInterrupt, SystemExit):  # Lightning exits when it is interrupted
        status = "KILLED"
    finally:
        record.finish(status)
    return Outcome(run.module.evaluations, plan.summary(), record.run_folder, record, status)


def make_record(recipe: Recipe) -> MLflowRun:
    """The MLflow run that a recipe's section ``tracking`` describes; not started."""
    given = recipe.values.get("tracking", {})
    check_arguments(recipe, "tracking", given, MLflowRun)
    name = f"{recipe.name}-seed{recipe.values.get('seed', 0)}"
    return MLflowRun(**{"run_name": name, **given})


def find_origin(resume: str, uri: str | None) -> Origin:
    """The checkpoint that ``--resume`` means: a file, or the newest of a run.

    Args:
        resume: a checkpoint, or id or name of a run.
        uri: tracking server to look for the run; None for the usual one.

    Raises:
        UserError: there is no such run or checkpoint, or it is none of ours.
    """
    path = Path(resume)
    if not path.is_file():
        if path.suffix == ".ckpt":
            raise UserError(f"checkpoint {resume}: there is no such file")
        _, folder = MLflowRun(uri=uri).find(resume)
        files = sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda f: f.stat().st_mtime)
        if not files:
            raise UserError(f"run {resume} has no checkpoint in {folder / 'checkpoints'}")
        path = files[-1]
    saved = _read_provenance(path)
    recipe = recipe_from_yaml(saved["recipe"], saved["recipe_name"])
    return Origin(path, recipe, saved["run_id"])


def _read_provenance(path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        saved: dict[str, Any] = checkpoint["lightning_qrl"]
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"checkpoint {path} is damaged or not written by qrl: {reason}") from error
    return saved


def same_run(recipe: Recipe, origin: Origin) -> bool:
    """Whether a recipe continues the run of a checkpoint rather than starting one from it."""

    def essence(of: Recipe) -> dict[str, Any]:
        return {k: v for k, v in of.flat().items() if not k.startswith(CONTINUES)}

    return essence(recipe) == essence(origin.recipe)


def _start(
    record: MLflowRun, recipe: Recipe, plan: PrecisionPlan, run: Run, origin: Origin | None
) -> None:
    if origin is not None and same_run(recipe, origin):
        record.resume(origin.run_id)
    else:
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
    callbacks = list(run.callbacks.values())
    folder = str(record.root)
    args = {"enable_checkpointing": any(map(_is_checkpointing, callbacks)), **run.trainer_args}
    try:
        return L.Trainer(**args, callbacks=callbacks, logger=record, default_root_dir=folder)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"trainer: {' '.join(str(error).split())}") from error


def _is_checkpointing(callback: L.Callback) -> bool:
    return isinstance(callback, L.pytorch.callbacks.Checkpoint)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's advice that does not fit rollouts, and its banner of devices."""
    import logging
    import warnings

    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*The number of training batches.*")
        yield
    logger.setLevel(level)
