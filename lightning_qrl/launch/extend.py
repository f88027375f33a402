"""Writing a recipe that extends another one by layers to keep in BF16."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_qrl.errors import UserError
from lightning_qrl.recipe import COMMAND_LINE, FOLDERS, Recipe, find_recipe

KEY = "sensitive_weights"


def check_new(file: Path) -> None:
    """Fail early if a recipe could not be written.

    Raises:
        UserError: the file is there already, is no ``.yaml``, or its folder is not there.
    """
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file}: the name of a recipe ends in .yaml")
    if os.path.lexists(file):
        raise UserError(f"{file} is there already; choose another name")
    if not file.parent.is_dir():
        raise UserError(f"{file} cannot be written: there is no folder {file.parent}")


def write_protected(
    file: Path, name: str, recipe: Recipe, without: Sequence[str], select: Sequence[str], said: str
) -> None:
    """Write a recipe that says what another one says, and keeps more layers in BF16.

    Args:
        file: the new recipe.
        name: the recipe to extend, as `find_recipe` takes it.
        recipe: that recipe with its overrides, which the new one has too.
        without: callbacks that were left out of it, and are of the new one.
        select: selectors of the layers to keep, besides those it keeps already.
        said: a comment, for the first line.

    Raises:
        UserError: the file cannot be written.
    """
    overrides = dict(dict(recipe.sources).get(COMMAND_LINE, {}))
    callbacks: dict[str, Any] = {**(overrides.pop("callbacks", None) or {})}
    callbacks |= dict.fromkeys(without)
    own = recipe.values["callbacks"].get(KEY, {})
    kept = own.get("select", [])
    kept = [kept] if isinstance(kept, str) else list(kept)
    callbacks[KEY] = {**own, "select": list(dict.fromkeys([*kept, *select]))}
    values = {"extends": _parent(name, file), **overrides, "callbacks": callbacks}
    text = f"# {said}\n{OmegaConf.to_yaml(OmegaConf.create(values))}"
    try:
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None


def _parent(name: str, file: Path) -> str:
    """What the new recipe calls the old one: a shipped name, or a path from its own folder."""
    path = find_recipe(name).resolve()
    if path.parent in [folder.resolve() for folder in FOLDERS]:
        return path.stem
    return os.path.relpath(path, file.resolve().parent)
