"""Where a run is resumed from: finding the checkpoint, and checking that it can be gone on from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_qrl.asynchrony.pipeline import check_queue
from lightning_qrl.build import Run
from lightning_qrl.data import RolloutData
from lightning_qrl.errors import UserError, described
from lightning_qrl.launch.checkpoints import FOLDER, newest_first, newest_sound, read_sound
from lightning_qrl.launch.rehearsal import corrections_of, replays_routes
from lightning_qrl.recipe import Recipe, recipe_from_yaml
from lightning_qrl.tracking import MLflowRun

CONTINUES = ("trainer.max_steps", "tracking.")  # what may change within one run


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run is resumed from.

    Attributes:
        checkpoint: the file.
        recipe: the recipe that wrote it.
        run_id: the MLflow run that wrote it.
        step: optimizer steps that it has behind it.
        shapes: shape of every weight in it, by name.
        queue: what waited for training when it was written (`RolloutData.state_dict`).
    """

    checkpoint: Path
    recipe: Recipe
    run_id: str
    step: int
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    queue: dict[str, Any] = field(repr=False)


def find_origin(resume: str, uri: str | None) -> Origin:
    """The checkpoint that ``--resume`` means: a file, or the newest of a run.

    Args:
        resume: a checkpoint, or id or name of a run.
        uri: tracking server to look for the run; None for the usual one.

    Raises:
        UserError: there is no such run or checkpoint, or it is none of ours.
    """
    path, *older = _checkpoints(resume, uri)
    try:
        return _read_origin(path)
    except UserError as error:
        sound = newest_sound(older)
        if sound is None:
            raise
        raise UserError(f"{error}; the next older one is sound: qrl fit --resume {sound}") from None


def _read_origin(path: Path) -> Origin:
    saved = read_sound(path)
    try:
        ours = saved["lightning_qrl"]
        recipe = recipe_from_yaml(ours["recipe"], ours["recipe_name"])
        shapes = {name: tuple(tensor.shape) for name, tensor in saved["state_dict"].items()}
        queue = saved.get(RolloutData.__name__, {})  # so Lightning names it
        return Origin(path, recipe, ours["run_id"], saved["global_step"], shapes, queue)
    except Exception as error:  # whatever is in the file
        said = "is damaged or not written by qrl"
        raise UserError(f"checkpoint {path} {said}: {described(error)}") from error


def _checkpoints(resume: str, uri: str | None) -> list[Path]:
    """The checkpoint that is meant; of a run all of them, the newest first."""
    path = Path(resume)
    if path.is_file():
        return [path]
    if path.suffix == ".ckpt":
        raise UserError(f"checkpoint {resume}: there is no such file")
    run_folder = path if path.is_dir() else MLflowRun(uri=uri).find(resume)
    files = newest_first(run_folder / FOLDER)
    if not files:
        raise UserError(
            f"run {resume} has no checkpoint in {run_folder / FOLDER}: it ended before its first; "
            f"start it again: qrl fit --rerun {resume}"
        )
    return files


def check_origin(origin: Origin, run: Run, ranks: int) -> None:
    """Fail before anything is written if a run cannot go on from a checkpoint on so many ranks."""
    total = run.trainer_args["max_steps"]
    if origin.step > total:
        raise UserError(
            f"checkpoint {origin.checkpoint} is at step {origin.step}, beyond trainer.max_steps "
            f"({total}); set that higher"
        )
    phase = getattr(run.data, "updates_per_rollout", 1)
    if origin.step % phase and origin.step < total:
        raise UserError(
            f"checkpoint {origin.checkpoint} is at step {origin.step}, inside a rollout phase of "
            f"{phase} steps; only its start can be resumed: take another checkpoint"
        )
    weights = run.module.policy.skeleton().state_dict()
    wanted = {f"model.{name}": tuple(tensor.shape) for name, tensor in weights.items()}
    differ = sorted(set(wanted.items()) ^ set(origin.shapes.items()))
    if differ:
        raise UserError(
            f"checkpoint {origin.checkpoint} does not fit policy {run.module.policy.name}: "
            f"{len({name for name, _ in differ})} weights differ, such as {differ[0][0]}"
        )

    if isinstance(run.data, RolloutData) and 0 < origin.step < total:
        head, routes = corrections_of(run).head, replays_routes(run)
        settings = run.data.queue_settings(run.module.engine.max_new_tokens, head, routes)
        check_queue(origin.queue, settings, ranks)


def same_run(recipe: Recipe, origin: Origin) -> bool:
    """Whether a recipe continues the run of a checkpoint rather than starting one from it."""

    def essence(of: Recipe) -> dict[str, Any]:
        return {k: v for k, v in of.flat().items() if not k.startswith(CONTINUES)}

    return essence(recipe) == essence(origin.recipe)
