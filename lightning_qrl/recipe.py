"""A recipe: a YAML stack of settings and callbacks; loading, inheritance, overrides.

    extends: base                 another recipe, by name or path; this one is merged over it
    callbacks:                    an ordered mapping; its keys are the handles of ablation
      bf16_tail: {fraction: 0.15}
      live_view: null             null takes out what the parent put in

OmegaConf does loading, merging, interpolation and dotted overrides; the result is plain containers.
Nothing here imports torch: what the values mean is checked in `build`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_qrl.errors import UserError
from lightning_qrl.plugins import nearest

SECTIONS = (
    "seed", "policy", "task", "grpo", "supervised", "rollout", "optimizer", "trainer", "callbacks",
    "tracking",
)  # fmt: skip
COMMAND_LINE = "command line"
PACKAGE = Path(__file__).parent
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "recipes")  # the wheel's, then the checkout's


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
        """An error about a dotted key, naming the file that set it last."""
        says = [label for label, values in self.sources if _has(values, path.split("."))]
        return UserError(f"{says[-1] if says else self.sources[-1][0]}: {path}: {message}")

    def to_yaml(self) -> str:
        """The resolved recipe as YAML, which is again a recipe."""
        return OmegaConf.to_yaml(OmegaConf.create(self.values))

    def flat(self) -> dict[str, Any]:
        """Every value by its dotted key."""
        return dict(_leaves(self.values))


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.yaml")})


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
        if path.is_file():
            return path
    stem = Path(file).stem
    raise UserError(f"recipe {name} not found; {nearest(stem, recipe_names())}")


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
    sources = [*_read_chain(path, ()), (COMMAND_LINE, _parse_overrides(overrides))]
    merged = OmegaConf.merge(*(values for _, values in sources))
    try:
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from None
    assert isinstance(values, dict)
    recipe = Recipe(path.stem, {str(key): value for key, value in values.items()}, tuple(sources))
    _check_sections(recipe)
    _drop_callbacks(recipe, without)
    return recipe


def recipe_from_yaml(
    text: str, name: str, overrides: Sequence[str] = (), without: Sequence[str] = ()
) -> Recipe:
    """A recipe from the YAML of a resolved one (see `Recipe.to_yaml`)."""
    stored, changes = OmegaConf.create(text), _parse_overrides(overrides)
    values = OmegaConf.to_container(OmegaConf.merge(stored, changes), resolve=True)
    assert isinstance(values, dict)
    plain = {str(key): value for key, value in values.items()}
    recipe = Recipe(name, plain, (("checkpoint", plain), (COMMAND_LINE, changes)))
    _check_sections(recipe)
    _drop_callbacks(recipe, without)
    return recipe


def _read_chain(path: Path, children: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A recipe's ancestors, oldest first, then the recipe itself; without their ``extends``."""
    if path in children:
        raise UserError(f"{path}: extends itself through {children[-1]}")
    values = _read(path)
    parent = values.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise UserError(f"{path}: extends: expected the name of a recipe, got {parent!r}")
        try:
            parent_path = find_recipe(parent, beside=path.parent)
        except UserError as error:
            raise UserError(f"{path}: extends: {error}") from None
        yield from _read_chain(parent_path, (*children, path))
    yield str(path), values


def _read(path: Path) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not readable as YAML: {_one_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, got {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip() or any(not part for part in key.split(".")):
            raise UserError(f"{COMMAND_LINE}: {override!r} is no override; write key.subkey=value")
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)), resolve=False)
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{COMMAND_LINE}: {_one_line(error)}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _check_sections(recipe: Recipe) -> None:
    for key, value in recipe.values.items():
        if key not in SECTIONS:
            raise recipe.error(key, f"no such section; {nearest(key, list(SECTIONS))}")
        if key == "seed":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise recipe.error(key, f"expected an integer of at least 0, got {value!r}")
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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
