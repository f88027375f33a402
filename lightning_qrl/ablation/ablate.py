"""An ablation from its design to its last word.

The parent run is found by the design's hash, and the folder by the parent's tag, so the same
command, started again after whatever has ended the first one, goes on in them; in whatever folder
it is started, as long as it is told the same tracking server. The lock in that folder keeps a
second process off while one is at work: on one machine, and on several where they share the folder.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
)

import lightning_qrl
from lightning_qrl.ablation.conduct import Conductor, Signals, find_standing
from lightning_qrl.ablation.design import Design
from lightning_qrl.ablation.job import Job, write_jobs
from lightning_qrl.ablation.launchers import Launcher
from lightning_qrl.ablation.locks import held
from lightning_qrl.arguments import make
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.launch import check, rehearse
from lightning_qrl.recipe import Recipe, recipe_from_yaml
from lightning_qrl.reports.ablation import Standing, result
from lightning_qrl.tracking import MLflowRun, Status, git_tags, tags
from lightning_qrl.tracking.family import Family
from lightning_qrl.tracking.names import folder_name
from lightning_qrl.tracking.reach import check_writable

WATCHING = (  # of Lightning's own; its others average weights, prune, freeze, accumulate, stop
    Checkpoint,
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
)


def is_ingredient(callback: L.Callback) -> bool:
    """Whether a callback changes what is trained, or how long; the others only watch or save."""
    return not getattr(callback, "instrument", isinstance(callback, WATCHING))


def find_ingredients(recipe: Recipe, *, here: bool) -> list[str]:
    """Keys of a recipe's ingredients, once everything about the recipe has been checked.

    Args:
        recipe: the full stack.
        here: whether it is to run on this machine, which is checked then too.

    Raises:
        UserError: it cannot be run.
    """
    if here:
        run = check(recipe)[0]
    else:
        run = build(recipe)
        rehearse(run)
        _place(recipe)
    return [key for key, callback in run.callbacks.items() if is_ingredient(callback)]


def ablate(design: Design, make_launcher: Callable[[str], Launcher]) -> int:
    """Run what of a design has not been run.

    Args:
        design: what to run.
        make_launcher: gives what starts the jobs, for a tracking server.

    Returns:
        The exit code: 0, 1 if a job failed, and as of a shell if a signal stopped it.

    Raises:
        UserError: the folder or the server is at fault, or the same ablation is running.
    """
    place = _place(recipe_from_yaml(design.arms[0].recipe, design.recipe))
    launcher = make_launcher(place.uri)
    check_writable(place.root, "set tracking.folder")
    family = Family(place.uri, place.experiment_name)
    folder = _folder(design, family, place.root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / "lock", wait=False) as alone:
            if not alone:
                raise UserError(f"this ablation is running already; its logs are in {folder}")
            return _conduct(design, launcher, family, folder, place.run_name)
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"ablation stopped: {where}: {error.strerror or error}") from error


def _conduct(
    design: Design, launcher: Launcher, family: Family, folder: Path, run_name: str
) -> int:
    """From the parent run's start to its end."""
    title = f"ablation of {design.recipe}: {design.size}, {launcher.about}"
    status: Status = "FAILED"
    signals = Signals()
    with signals.counted():
        try:
            known = family.open(run_name, _tags(design, folder))
            jobs = _prepare(design, family, folder)
            standing = find_standing(title, jobs, family)
            print("\n".join(_opening(design, family, folder, standing, known=known)), flush=True)
            conductor = Conductor(jobs, standing, launcher, family, signals)
            ended = conductor.run()
            status = "FINISHED" if ended else "KILLED"
        finally:
            if family.parent:
                family.close(status)
        print(result(conductor.standing, family.parent))
    if not ended:
        print("go on   the same command again")
        return 128 + signals.last
    return int(bool(conductor.standing.failures()))


def _folder(design: Design, family: Family, root: Path) -> Path:
    """Where the lock, the jobs and their logs are: where they were, if that is there."""
    there = family.folder(design.hash())
    if there is not None and there.is_dir():
        return there
    return root / folder_name(f"ablate-{design.recipe}", design.hash()[:8])


def _prepare(design: Design, family: Family, folder: Path) -> list[Job]:
    """Write down what is to be run, and put in order what a run that was killed has left."""
    whole = replace(design, seeds=tuple(sorted({*design.seeds, *_seeds(family)})))
    texts = {"design.json": json.dumps(whole.to_json(), indent=1)}
    family.describe({**texts, "recipe.yaml": design.arms[0].recipe})
    jobs = write_jobs(design, family, folder)
    family.catch_up(folder.parent)
    family.tidy()
    return jobs


def _seeds(family: Family) -> set[int]:
    return {seed for _, seed in family.members()}


def _opening(
    design: Design, family: Family, folder: Path, standing: Standing, *, known: bool
) -> list[str]:
    """The first words."""
    lines = [standing.title, *(f"{one} = {other}" for one, other in design.same.items())]
    lines.append(f"parent {family.parent}, logs in {folder}")
    if known:
        lines.append(f"continued: {standing.counted}")
    if others := sorted(_seeds(family) - set(design.seeds)):
        lines.append(f"as they are: the runs with seed {', '.join(map(str, others))}")
    return lines


def _place(recipe: Recipe) -> MLflowRun:
    """Where the section ``tracking`` has it recorded; nothing is started."""
    given = {"run_name": f"ablate-{recipe.name}", **recipe.values.get("tracking", {})}
    place: MLflowRun = make(recipe, "tracking", MLflowRun, given)
    return place


def _tags(design: Design, folder: Path) -> dict[str, str]:
    return {
        tags.DESIGN: design.hash(),
        tags.RECIPE: design.recipe,
        tags.RECIPE_HASH: design.arms[0].recipe_hash,
        tags.FOLDER: str(folder),
        "qrl.version": lightning_qrl.__version__,
        **git_tags(Path(lightning_qrl.__file__).parent),
    }
