"""A recipe: a YAML stack of settings and callbacks; loading, inheritance, overrides.

    extends: base                 another recipe, by name or path; this one is merged over it
    callbacks:                    an ordered mapping; its keys are the handles of ablation
      bf16_tail: {fraction: 0.15}
      live_view: null             null takes out what the parent put in

OmegaConf does loading, merging, interpolation and dotted overrides; the result is plain containers.
Nothing here imports torch: what the values mean is checked in `build`.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_qrl.errors import UserError, described
from lightning_qrl.plain_yaml import check_numbers, check_plain, own_resolvers
from lightning_qrl.plugins import nearest

SECTIONS = (
    "seed", "policy", "task", "grpo", "supervised", "rollout", "optimizer", "trainer", "callbacks",
    "tracking",
)  # fmt: skip
COMMAND_LINE = "command line"
PACKAGE = Path(__file__).parent
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "recipes")  # the wheel's, then the checkout's
INTERPOLATION = re.compile(r"(\\*)\$\{")  # with the backslashes that may escape it
MAX_SEED = 2**32 - 1  # numpy's
TOLD = (ValueError, YAMLError, OmegaConfBaseException)  # that explain themselves


@dataclass(frozen=True, slots=True)
class Recipe:
    """A resolved recipe.

    Attributes:
        name: its file's name without the suffix.
        values: plain containers, everything merged and interpolated.
        sources: the files, lowest first, then the command line, with what each one says.
    """

    name: str
    values: dict[str, Any]
    sources: tuple[tuple[str, dict[str, Any]], ...] = field(repr=False)

    def error(self, path: str, message: str) -> UserError:
        """An error about a dotted key, naming what set it last; of one not set, the recipe."""
        parts = [path] if path in self.values else path.split(".")
        says = [label for label, values in self.sources if _has(values, parts)]
        files = [label for label, _ in self.sources if label != COMMAND_LINE]
        return UserError(f"{says[-1] if says else files[-1]}: {path}: {message}")

    def to_yaml(self) -> str:
        """The resolved recipe as YAML, which is again a recipe."""
        return OmegaConf.to_yaml(OmegaConf.create(_escaped(self.values)))

    def hash(self) -> str:
        """SHA-256 (16 hex digits) of all but ``seed`` and ``tracking``."""
        own = {k: v for k, v in self.values.items() if k not in ("seed", "tracking")}
        return sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def flat(self) -> dict[str, Any]:
        """Every value by its dotted key."""
        return dict(_leaves(self.values))


def shipped_recipes() -> dict[str, Path]:
    """The files of the shipped recipes by their names, sorted."""
    files = [path for folder in reversed(FOLDERS) for path in folder.glob("*.yaml")]
    return dict(sorted((path.stem, path) for path in files))


def recipe_names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return list(shipped_recipes())


def find_recipe(name: str, beside: Path | None = None) -> Path:
    """The file of a recipe.

    Args:
        name: a path, or the name of a shipped recipe with or without ``.yaml``.
        beside: a folder to look in first, for ``extends``.

    Raises:
        UserError: there is none; the message gives the nearest names.
    """
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    for path in [*([beside / file] if beside else []), Path(file), *(f / file for f in FOLDERS)]:
        if os.path.isfile(path):  # unlike Path.is_file, it takes any name
            return path
    if os.path.isdir(name):
        raise UserError(f"recipe {name} is a folder; name a file in it")
    stem = Path(file).stem
    raise UserError(f"recipe {name} not found; {nearest(stem, recipe_names())}")


def read_text(path: Path) -> str:
    """The text of a recipe's file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds, its interpolations as they are."""
    text = read_text(path)
    return _plain(f"{path}: not readable as YAML", lambda: _parse(text))


def load_recipe(name: str, overrides: Sequence[str] = (), without: Sequence[str] = ()) -> Recipe:
    """Load a recipe.

    Args:
        name: see `find_recipe`.
        overrides: ``key=value`` with dotted keys; the value is YAML.
        without: keys of callbacks to leave out.

    Raises:
        UserError: a file is missing or no YAML mapping, an override is malformed, an interpolation
            leads nowhere, a callback to leave out is not there, a section is unknown.
    """
    path = find_recipe(name)
    sources = [*_read_chain(path, ()), (COMMAND_LINE, parse_overrides(overrides))]
    return _resolve(path.stem, sources, str(path), without)


def recipe_from_yaml(
    text: str,
    name: str,
    overrides: Sequence[str] = (),
    without: Sequence[str] = (),
    label: str = "checkpoint",
) -> Recipe:
    """A recipe from the YAML of a resolved one (see `Recipe.to_yaml`); errors call it `label`."""
    stored = _plain(label, lambda: _parse(text))
    sources = [(label, stored), (COMMAND_LINE, parse_overrides(overrides))]
    return _resolve(name, sources, label, without)


def _resolve(
    name: str, sources: list[tuple[str, dict[str, Any]]], label: str, without: Sequence[str]
) -> Recipe:
    """Merge the sources, resolve interpolations, check the sections, leave callbacks out."""
    together = reduce(merge, (values for _, values in sources))
    merged = _plain(label, lambda: OmegaConf.create(together), resolve=True)
    recipe = Recipe(name, merged, tuple(sources))
    _check_sections(recipe)
    _drop_callbacks(recipe, without)
    return recipe


def _read_chain(path: Path, children: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A recipe's ancestors, oldest first, then the recipe itself; without their ``extends``."""
    real = path.resolve()
    if real in children:
        raise UserError(f"{path}: extends itself through {children[-1]}")
    values = read_mapping(path)
    parent = values.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise UserError(f"{path}: extends: expected the name of a recipe, got {parent!r}")
        try:
            parent_path = find_recipe(parent, beside=path.parent)
        except UserError as error:
            raise UserError(f"{path}: extends: {error}") from None
        yield from _read_chain(parent_path, (*children, real))
    yield str(path), values


def merge(below: Any, above: Any) -> Any:
    """Mappings are merged key by key; anything else is replaced."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = {
        key: merge(below[key], value)
        if key in below and not _other_task(key, below[key], value)
        else value
        for key, value in above.items()
    }
    return {**below, **merged}


def _other_task(key: str, below: Any, above: Any) -> bool:
    """Whether a section names another task: the options of the one below are not its own."""
    if key != "task" or not (isinstance(below, dict) and isinstance(above, dict)):
        return False
    return any(n in above and above[n] != below.get(n) for n in ("name", "_target_"))


def _plain(label: str, make: Callable[[], Any], *, resolve: bool = False) -> dict[str, Any]:
    """What OmegaConf makes, as plain containers with text as keys."""
    try:
        with own_resolvers():
            made = OmegaConf.to_container(make(), resolve=resolve, throw_on_missing=resolve)
        check_numbers(made)
    except Exception as error:  # YAML and OmegaConf raise many kinds
        said = str(error) if isinstance(error, TOLD) else described(error)
        raise UserError(f"{label}: {said}") from None
    if not isinstance(made, dict):
        raise UserError(f"{label}: a recipe is a mapping of sections, got a list")
    values: dict[str, Any] = _text_keys(made)
    return values


def _parse(text: str) -> Any:
    if check_plain(text) == "scalar":
        raise UserError("a recipe is a mapping of sections, got a single value")
    return OmegaConf.create(text)


def _text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _text_keys(part) for key, part in value.items()}
    return [_text_keys(part) for part in value] if isinstance(value, list) else value


def _escaped(value: Any) -> Any:
    """Containers whose texts stay what they are when OmegaConf resolves them once more."""
    if isinstance(value, dict):
        return {key: _escaped(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_escaped(part) for part in value]
    return INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """What ``key.subkey=value`` says, as nested mappings; UserError where one is malformed."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip() or any(not part for part in key.split(".")):
            raise UserError(f"{COMMAND_LINE}: {override!r} is no override; write key.subkey=value")
        _check_value(key, value)
    return _plain(COMMAND_LINE, lambda: OmegaConf.from_dotlist(list(overrides)))


def _check_value(key: str, value: str) -> None:
    try:
        check_plain(value)
    except UserError as error:
        raise UserError(f"{COMMAND_LINE}: {key}: {error}") from None
    except YAMLError:
        raise UserError(
            f"{COMMAND_LINE}: {key}: {value} is no YAML; a text that begins with * or & needs "
            f"quotes of its own: {key}='\"{value}\"'"
        ) from None


def _check_sections(recipe: Recipe) -> None:
    for key, value in recipe.values.items():
        if key not in SECTIONS:
            raise recipe.error(key, f"no such section; {nearest(key, list(SECTIONS))}")
        if key == "seed":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
                raise recipe.error(key, f"expected an integer from 0 to 2**32 - 1, got {value!r}")
        elif not isinstance(value, dict):
            raise recipe.error(key, f"expected a mapping, got {value!r}")


def _drop_callbacks(recipe: Recipe, without: Sequence[str]) -> None:
    callbacks = recipe.values.setdefault("callbacks", {})
    for key in without:
        if key not in callbacks:
            raise UserError(f"--without {key}: no such callback; {nearest(key, list(callbacks))}")
        callbacks[key] = None
    recipe.values["callbacks"] = {k: v for k, v in callbacks.items() if v is not None}


def _has(values: Any, path: Sequence[str]) -> bool:
    if not path:
        return True
    return isinstance(values, dict) and path[0] in values and _has(values[path[0]], path[1:])


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
