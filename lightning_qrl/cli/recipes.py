"""`qrl recipes`: the shipped stacks, to list, show, copy, check and compare."""

import difflib
from pathlib import Path
from typing import Annotated

import typer

from lightning_qrl.cli.options import Overrides
from lightning_qrl.errors import UserError
from lightning_qrl.recipe import find_recipe, load_recipe, recipe_names

app = typer.Typer(help="The recipes: ls, show, cp, validate, diff.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped name or a path.")]


@app.command("ls")
def ls() -> None:
    """List the shipped recipes.

    Example: qrl recipes ls
    """
    names = recipe_names()
    for name in names:
        first = find_recipe(name).read_text().splitlines()[0]
        print(f"{name:{max(map(len, names))}}  {first.removeprefix('#').strip()}")


@app.command("show")
def show(
    name: Name,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Merged with what it extends.")
    ] = False,
) -> None:
    """Print a recipe.

    Example: qrl recipes show 4bitter --resolved
    """
    print(load_recipe(name).to_yaml() if resolved else find_recipe(name).read_text(), end="")


@app.command("cp")
def cp(name: Name, target: Annotated[Path, typer.Argument(help="A file or a folder.")]) -> None:
    """Copy a recipe, to change it.

    Example: qrl recipes cp 4bitter mine.yaml
    """
    source = find_recipe(name)
    file = target / source.name if target.is_dir() else target
    if file.exists():
        raise UserError(f"{file} is there already; choose another name")
    try:
        file.write_text(source.read_text())
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None
    print(file)


@app.command("validate")
def validate(name: Name, overrides: Overrides = None) -> None:
    """Check a recipe to the last key, and its plan on the policy's architecture.

    Example: qrl recipes validate mine.yaml
    """
    from lightning_qrl.build import build
    from lightning_qrl.launch import rehearse

    plan = rehearse(build(load_recipe(name, overrides or ())))
    print(f"{find_recipe(name)}: {plan.summary()}")


@app.command("diff")
def diff(first: Name, second: Name) -> None:
    """Show how two recipes differ once resolved.

    Example: qrl recipes diff nvfp4_naive 4bitter
    """
    a, b = (load_recipe(name).to_yaml().splitlines() for name in (first, second))
    for line in difflib.unified_diff(a, b, first, second, lineterm=""):
        print(line)
