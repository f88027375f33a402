"""`qrl fit`: train by a recipe."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_qrl.cli.options import Overrides, Without
from lightning_qrl.cli.quiet import quiet_imports
from lightning_qrl.errors import UserError
from lightning_qrl.tracking import tags

if TYPE_CHECKING:
    from lightning_qrl.launch import Origin
    from lightning_qrl.launch.rerun import Original
    from lightning_qrl.recipe import Recipe


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
    rerun: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Repeat a run (id or name) from what MLflow holds."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the resolved recipe.")
    ] = False,
) -> None:
    """Train by a recipe: a live view, one MLflow run, the trained policy in its folder.

    Example: qrl fit --recipe 4bitter.yaml --without bf16_tail seed=1 trainer.max_steps=50
    """
    if rerun is not None:
        if recipe is not None or resume is not None or without:
            raise UserError("--rerun repeats a run as it was: no --recipe, --resume, --without")
        _repeat(rerun, overrides or (), dry_run=dry_run)
        return
    if recipe is None and resume is None:
        raise UserError("give --recipe, or --resume to continue a run, or --rerun to repeat one")
    chosen, origin = _chosen(recipe, resume, overrides or (), without or ())
    _train(chosen, origin, own={tags.REMOVED: ",".join(without or ())}, dry_run=dry_run)


def _train(
    chosen: "Recipe",
    origin: "Origin | None" = None,
    original: "Original | None" = None,
    *,
    own: Mapping[str, str],
    dry_run: bool,
) -> None:
    """Check or train, with tags of its own, and say what came of it."""
    with quiet_imports():
        from lightning_qrl.launch import check, launch
        from lightning_qrl.reports.summary import summary

    if dry_run:
        check(chosen, origin)
        print(chosen.to_yaml(), end="")
        return
    outcome = launch(chosen, origin, own)
    evaluates = "held_out_evaluation" in chosen.values["callbacks"]
    ended = outcome.status, outcome.plan, outcome.evaluations, outcome.run
    print(summary(*ended, evaluates=evaluates))
    if original is not None:
        print(original.verdict(outcome.run.policy_sha256))
    sys.exit(outcome.exit_code)


def _repeat(rerun: str, overrides: Sequence[str], *, dry_run: bool) -> None:
    """Train as a run in MLflow was trained; say first what has changed around it."""
    from lightning_qrl.recipe import recipe_from_yaml

    with quiet_imports():
        from lightning_qrl.build import build
        from lightning_qrl.launch.provenance import datasets_of, environment_tags, source_tags
        from lightning_qrl.launch.rerun import find_original

    uri = recipe_from_yaml("{}", rerun, overrides).flat().get("tracking.uri")
    original = find_original(rerun, uri, overrides)
    if not dry_run:
        run = build(original.recipe)
        now = environment_tags(original.recipe) | source_tags(run)
        differences = original.differences(now, datasets_of(original.recipe, run.module.task))
        said = differences or ["the code, the packages, the data and the machine are as they were"]
        print("\n".join([f"repeats  run {original.run_id}", *said]), flush=True)
    own = {tags.RERUN_OF: original.run_id, tags.REMOVED: original.tags.get(tags.REMOVED, "")}
    _train(original.recipe, original=original, own=own, dry_run=dry_run)


def _chosen(
    recipe: str | None, resume: str | None, overrides: Sequence[str], without: Sequence[str]
) -> "tuple[Recipe, Origin | None]":
    """What to train by, and from where; without ``--recipe`` that of the run to continue."""
    from lightning_qrl.recipe import load_recipe, recipe_from_yaml

    chosen = None if recipe is None else load_recipe(recipe, overrides, without)
    if resume is None:
        assert chosen is not None
        return chosen, None
    with quiet_imports():
        from lightning_qrl.launch import find_origin

    says = recipe_from_yaml("{}", resume, overrides) if chosen is None else chosen
    origin = find_origin(resume, says.flat().get("tracking.uri"))
    if chosen is None:
        stored = origin.recipe
        chosen = recipe_from_yaml(stored.to_yaml(), stored.name, overrides, without)
    return chosen, origin
