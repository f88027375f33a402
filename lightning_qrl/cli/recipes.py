"""`qrl recipes`: the shipped stacks, to list, show, copy, check and compare."""

import os
from pathlib import Path
from typing import Annotated

import typer

from lightning_qrl.cli.options import Overrides
from lightning_qrl.cli.quiet import quiet_imports
from lightning_qrl.errors import UserError

app = typer.Typer(help="The recipes: ls, show, cp, validate, diff.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped name or a path.")]


@app.command("ls")
def ls() -> None:
    """List the shipped recipes.

    Example: qrl recipes ls
    """
    from lightning_qrl.recipe import read_text, shipped_recipes

    recipes = shipped_recipes()
    for name, path in recipes.items():
        first = read_text(path).partition("\n")[0]
        print(f"{name:{max(map(len, recipes))}}  {first.removeprefix('#').strip()}")


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
    from lightning_qrl.recipe import find_recipe, load_recipe, read_text

    print(load_recipe(name).to_yaml() if resolved else read_text(find_recipe(name)), end="")


@app.command("cp")
def cp(name: Name, target: Annotated[Path, typer.Argument(help="A file or a folder.")]) -> None:
    """Copy a recipe, to change it.

    Example: qrl recipes cp 4bitter mine.yaml
    """
    from lightning_qrl.recipe import find_recipe, read_text

    source = find_recipe(name)
    text = read_text(source)
    file = target / source.name if target.is_dir() else target
    if os.path.lexists(file):
        raise UserError(f"{file} is there already; choose another name")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None
    print(file)


@app.command("validate")
def validate(name: Name, overrides: Overrides = None) -> None:
    """Check a recipe to the last key, and its plan on the policy's architecture.

    Example: qrl recipes validate mine.yaml
    """
    from lightning_qrl.recipe import find_recipe, load_recipe

    recipe = load_recipe(name, overrides or ())
    with quiet_imports():
        from lightning_qrl.build import build
        from lightning_qrl.launch import rehearse

    plan = rehearse(build(recipe))
    print(f"{find_recipe(name)}: {plan.summary()}")


@app.command("diff")
def diff(first: Name, second: Name) -> None:
    """Show how two recipes differ once resolved.

    Example: qrl recipes diff nvfp4_naive 4bitter
    """
    import difflib

    from lightning_qrl.recipe import load_recipe

    a, b = (load_recipe(name).to_yaml().splitlines() for name in (first, second))
    for line in difflib.unified_diff(a, b, first, second, lineterm=""):
        print(line)
