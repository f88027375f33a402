"""An ablation from its design to its last word.

The folder and the parent run are found by the design's hash, so the same command, started again
after whatever has ended the first one, goes on in them.
"""

import json
from collections.abc import Callable
from pathlib import Path

import lightning as L

import lightning_qrl
from lightning_qrl.ablation.conduct import Conductor, Signals
from lightning_qrl.ablation.design import Design
from lightning_qrl.ablation.job import write_jobs
from lightning_qrl.ablation.launchers import Launcher
from lightning_qrl.ablation.locks import held
from lightning_qrl.arguments import make
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.launch import check, rehearse
from lightning_qrl.recipe import Recipe, recipe_from_yaml
from lightning_qrl.reports.ablation import Screen, result
from lightning_qrl.tracking import MLflowRun, Status, git_tags, tags
from lightning_qrl.tracking.family import Family
from lightning_qrl.tracking.names import folder_name
from lightning_qrl.tracking.reach import check_writable

LIGHTNING = ("lightning", "pytorch_lightning")


def is_ingredient(callback: L.Callback) -> bool:
    """Whether a callback changes what is trained; the others only watch, save or stop."""
    ours = type(callback).__module__.partition(".")[0] not in LIGHTNING
    return ours and not getattr(callback, "instrument", False)


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
    recipe = recipe_from_yaml(design.arms[0].recipe, design.recipe)
    place = _place(recipe)
    launcher = make_launcher(place.uri)
    check_writable(place.root, "set tracking.folder")
    family = Family(place.uri, place.experiment_name)
    folder = place.root / folder_name(f"ablate-{design.recipe}", design.hash()[:8])
    folder.mkdir(parents=True, exist_ok=True)
    signals = Signals()
    with held(folder / "lock", wait=False) as alone, signals.counted():
        if not alone:
            raise UserError(f"this ablation is running already; its logs are in {folder}")
        own = _tags(design, folder)
        texts = {
            "design.json": json.dumps(design.to_json(), indent=1),
            "recipe.yaml": recipe.to_yaml(),
        }
        known = family.open(place.run_name, own, texts)
        return _conduct(design, launcher, family, folder, signals, known=known)


def _conduct(
    design: Design,
    launcher: Launcher,
    family: Family,
    folder: Path,
    signals: Signals,
    *,
    known: bool,
) -> int:
    size = f"{len(design.arms)} arms x {len(design.seeds)} seeds"
    title = f"ablation of {design.recipe}: {size}, {launcher.about}"
    print("\n".join([title, *(f"{one} = {other}" for one, other in design.same.items())]))
    print(f"parent {family.parent}, logs in {folder}", flush=True)
    status: Status = "FAILED"
    screen = Screen()
    jobs = write_jobs(design, family, folder)
    family.catch_up(folder.parent)
    family.tidy()
    conductor = Conductor(title, jobs, launcher, family, signals, screen)
    if known:
        print(f"continued: {conductor.standing.counted}", flush=True)
    try:
        with screen:
            ended = conductor.run()
        status = "FINISHED" if ended else "KILLED"
    finally:
        family.close(status)
    print(result(conductor.standing, family.parent))
    if not ended:
        print("go on   the same command again")
        return 128 + signals.last
    return int(bool(conductor.standing.failures()))


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
