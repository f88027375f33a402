"""`qrl fit`: train by a recipe."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_qrl.cli.options import Overrides, Without
from lightning_qrl.errors import UserError
from lightning_qrl.recipe import load_recipe, recipe_from_yaml

if TYPE_CHECKING:
    from lightning_qrl.launch import Outcome


def fit(
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="A recipe: a shipped name or a path.")
    ] = None,
    without: Without = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN|CKPT", help="Continue a run (id or name) or a checkpoint file."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the resolved recipe.")
    ] = False,
) -> None:
    """Train by a recipe: a live view, one MLflow run, the trained policy in its folder.

    Example: qrl fit --recipe 4bitter.yaml --without bf16_tail seed=1 trainer.max_steps=50
    """
    if recipe is None and resume is None:
        raise UserError("give --recipe, or --resume to continue a run")
    if dry_run and recipe is not None:
        from lightning_qrl.build import build
        from lightning_qrl.launch import rehearse

        chosen = load_recipe(recipe, overrides or (), without or ())
        rehearse(build(chosen))
        print(chosen.to_yaml(), end="")
        return
    from lightning_qrl.launch import find_origin, launch

    origin = find_origin(resume, None) if resume is not None else None
    if recipe is not None:
        chosen = load_recipe(recipe, overrides or (), without or ())
    else:
        assert origin is not None
        stored = origin.recipe
        chosen = recipe_from_yaml(stored.to_yaml(), stored.name, overrides or (), without or ())
    outcome = launch(chosen, origin)
    _print_summary(outcome)
    if outcome.status != "FINISHED":
        sys.exit(130)


def _print_summary(outcome: "Outcome") -> None:
    print(f"\n{outcome.status.lower()}: {outcome.plan}")
    if outcome.evaluations:
        first, last = min(outcome.evaluations), max(outcome.evaluations)
        before, after = (outcome.evaluations[step]["reward"] for step in (first, last))
        print(f"held-out reward  {before:.3f} at step {first}  ->  {after:.3f} at step {last}")
    print(f"run     {outcome.run.version} (id {outcome.run.run_id})")
    print(f"folder  {outcome.folder}")
    print(f"look    mlflow ui --backend-store-uri {outcome.run.uri}")
