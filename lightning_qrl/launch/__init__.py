"""Launching a run: rehearse, record, train, save.

Everything that can be wrong with a recipe is found before anything is written: the objects are
built and the plan is committed to the architecture on the meta device (`rehearse`), the output
folder and the tracking server are tried, and only then a run exists.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import lightning as L
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_qrl.arguments import make
from lightning_qrl.build import Run, build
from lightning_qrl.errors import in_one_line
from lightning_qrl.launch.checkpoints import WholeCheckpoints, full_disk_in_one_line
from lightning_qrl.launch.divergence import check_weights
from lightning_qrl.launch.failure import told_of
from lightning_qrl.launch.origin import Origin, check_origin, find_origin, same_run
from lightning_qrl.launch.process import (
    INTERRUPTED,
    asking,
    not_hiding_an_error,
    quiet,
    undisturbed,
)
from lightning_qrl.launch.provenance import (
    SESSIONS,
    datasets_of,
    environment_tags,
    peak_memory,
    recipe_tags,
    session,
    source_tags,
)
from lightning_qrl.launch.rehearsal import check_trainer, make_trainer, rehearse
from lightning_qrl.launch.stopping import StopAtPhaseEnd
from lightning_qrl.policy import weights_sha256
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.recipe import Recipe
from lightning_qrl.reports.plan import plan_columns, plan_text
from lightning_qrl.tracking import MLflowRun, Status
from lightning_qrl.tracking import tags as tags_
from lightning_qrl.tracking.models import Policies
from lightning_qrl.tracking.reach import shown

__all__ = ["Origin", "Outcome", "check", "find_origin", "launch", "rehearse"]


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


def check(
    recipe: Recipe, origin: Origin | None = None
) -> tuple[Run, PrecisionPlan, MLflowRun, L.Trainer]:
    """Build all that a run needs, and write nothing.

    Raises:
        UserError: the recipe or the checkpoint is at fault, or does not fit this machine.
    """
    run = build(recipe)
    with in_one_line(f"recipe {recipe.name}"):
        plan = rehearse(run)
        record = _make_record(recipe)
        with quiet():
            trainer = _make_trainer(run, record)
        check_trainer(run, trainer)
    if origin is not None:
        with in_one_line(f"checkpoint {origin.checkpoint}"):
            check_origin(origin, run, trainer.world_size)
    return run, plan, record, trainer


def launch(
    recipe: Recipe, origin: Origin | None = None, tags: Mapping[str, str] | None = None
) -> Outcome:
    """Train by a recipe, from the start or from a checkpoint.

    Args:
        recipe: what to do.
        origin: continue from here; in the same MLflow run if the recipe is the one that wrote it,
            save for `CONTINUES`.
        tags: further tags of the run in MLflow.

    Raises:
        UserError: the recipe, the folder, the server or the checkpoint is at fault, or the run has
            failed; what it failed with is the cause.
    """
    run, plan, record, trainer = check(recipe, origin)
    request = next(c.request for c in trainer.checkpoint_callbacks if isinstance(c, StopAtPhaseEnd))
    status: Status = "FAILED"
    exit_code = 1
    try:
        with quiet(), asking(request), full_disk_in_one_line(record):
            _start(record, recipe, plan, run, origin, tags or {})
            request.exit_if_asked()
            _train(trainer, recipe, run, record, origin)
        status, exit_code = "FINISHED", 0
    except Exception as error:
        told = told_of(error, record, run.callbacks) if trainer.is_global_zero else error
        if told is error:
            raise
        raise told from error
    except (KeyboardInterrupt, SystemExit):  # Lightning exits when it is interrupted
        status, exit_code = "KILLED", request.exit_code or INTERRUPTED
    finally:
        with undisturbed(), not_hiding_an_error(exit_code == 1):
            if record.begun:
                record.log_metrics(peak_memory(), trainer.global_step)
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
    record.policies = Policies(
        recipe.name,
        recipe_tags(recipe),
        lambda folder: run.module.policy.save(run.module.model, folder),
        lambda: trainer.global_step,
    )
    trainer.fit(run.module, run.data, ckpt_path=None if origin is None else origin.checkpoint)
    if trainer.state.status != TrainerStatus.FINISHED:
        raise KeyboardInterrupt
    check_weights(trainer, run.module)
    if trainer.is_global_zero:
        folder = record.run_folder / "policy"
        run.module.policy.save(run.module.model, folder)
        record.log_policy(folder, weights_sha256(run.module.model))


def _make_record(recipe: Recipe) -> MLflowRun:
    """The MLflow run that a recipe's section ``tracking`` describes; not started."""
    name = f"{recipe.name}-seed{recipe.values.get('seed', 0)}"
    given = {"run_name": name, **recipe.values.get("tracking", {})}
    record: MLflowRun = make(recipe, "tracking", MLflowRun, given)
    return record


def _start(
    record: MLflowRun,
    recipe: Recipe,
    plan: PrecisionPlan,
    run: Run,
    origin: Origin | None,
    further: Mapping[str, str],
) -> None:
    environment = environment_tags(recipe) | source_tags(run)
    continues = origin is not None and same_run(recipe, origin)
    if origin is not None and continues and not record.resume(origin.run_id):
        continues = False
        said = f"qrl: run {origin.run_id} is not at {shown(record.uri)}"
        print(f"{said}; it continues there as a new run", file=sys.stderr)
    if not continues:
        tags = {
            **recipe_tags(recipe),
            **environment,
            "qrl.policy": run.module.policy.name,
            "qrl.plan": plan.summary(),
            **further,
        }
        if origin is not None:
            tags[tags_.RESUMED_FROM] = origin.run_id
        record.start(recipe.flat(), tags)
    else:  # more steps are another recipe
        record.set_tags({tags_.RECIPE_HASH: further.get(tags_.RECIPE_HASH, recipe.hash())})
    record.log_entry(session(recipe, environment, origin.step if origin else 0), SESSIONS)
    record.log_text(shown(recipe.to_yaml()), "recipe.yaml")
    record.log_text(plan_text(plan.table()), "plan.txt")
    record.log_json(plan_columns(plan.table()), "plan.json")
    record.log_datasets(datasets_of(recipe, run.module.task))
    record.watch_system()


def _make_trainer(run: Run, record: MLflowRun) -> L.Trainer:
    return make_trainer(
        run,
        last=[StopAtPhaseEnd(record)],
        logger=record,
        default_root_dir=str(record.root),
        plugins=[WholeCheckpoints()],
    )
