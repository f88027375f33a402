"""`qrl ablate`: what each ingredient of a recipe does."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from lightning_qrl.cli.options import RecipeName
from lightning_qrl.cli.quiet import quiet_imports
from lightning_qrl.errors import UserError


class LauncherName(StrEnum):
    """What starts the runs."""

    LOCAL = "local"
    RAY = "ray"


def ablate(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=V1,V2]...", help="Overrides; several values are a factor."),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Arms: full, empty, and without each KEY; may be repeated."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Also the empty stack with this one; may be repeated."),
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also leave out each pair.")] = False,
    seeds: Annotated[int, typer.Option(help="How many, from the recipe's own up.")] = 1,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at once; by default one a GPU, or for two cores.")
    ] = None,
    launcher: Annotated[
        LauncherName, typer.Option(help="Run here, or as tasks of a Ray cluster.")
    ] = LauncherName.LOCAL,
) -> None:
    """Run a recipe, the empty stack, and the recipe less each callback, with the same seeds.

    Callbacks that only watch stay in every run. Stopped and started again, it continues.

    Example: qrl ablate --recipe 4bitter.yaml --seeds 3 --drop bf16_tail grpo.loss=dapo,gspo
    """
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    from lightning_qrl.ablation.design import Wish, make_design

    with quiet_imports():
        from lightning_qrl.ablation.ablate import ablate as run
        from lightning_qrl.ablation.ablate import find_ingredients
        from lightning_qrl.ablation.launchers import Launcher
        from lightning_qrl.ablation.local import LocalLauncher
        from lightning_qrl.ablation.ray import RayLauncher

    local = launcher is LauncherName.LOCAL

    def make_launcher(uri: str) -> Launcher:
        return LocalLauncher(jobs) if local else RayLauncher(jobs, uri)

    wish = Wish(tuple(drop or ()), tuple(only or ()), pairs, seeds)
    design = make_design(
        recipe, overrides or (), wish, lambda full: find_ingredients(full, here=local)
    )
    sys.exit(run(design, make_launcher))
