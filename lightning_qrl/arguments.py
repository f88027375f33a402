"""Constructing what a recipe describes: check a mapping against a signature, then call it.

The constructor is the configuration: its parameters are the keys, its annotations the types, its
defaults the defaults. There is no second schema that could disagree with it.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_type_hints

from lightning.fabric.utilities.exceptions import MisconfigurationException
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from lightning_qrl.errors import UserError, described
from lightning_qrl.plugins import load_plugin, nearest, plugin_names
from lightning_qrl.recipe import Recipe

REJECTED = (ValueError, MisconfigurationException)  # in which constructors explain themselves
LENIENT = ConfigDict(arbitrary_types_allowed=True)


def parameters(target: Callable[..., Any], injected: Collection[str] = ()) -> list[str]:
    """Names of the parameters that a recipe may set."""
    signature = inspect.signature(target)
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p.name for p in signature.parameters.values() if p.kind not in starred]
    return [name for name in named if name not in injected]


def check_arguments(
    recipe: Recipe,
    path: str,
    given: Mapping[str, Any],
    target: Callable[..., Any],
    injected: Collection[str] = (),
) -> None:
    """Check keys and types of the arguments that a recipe gives to a constructor.

    Args:
        recipe: named in the errors.
        path: dotted key of ``given``.
        given: the arguments.
        target: the constructor.
        injected: parameters that are not the recipe's to set.

    Raises:
        UserError: an unknown key (the nearest known is named), a missing one, or a wrong type.
    """
    known = parameters(target, injected)
    signature = inspect.signature(target)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    hints = _type_hints(target)
    for key, value in given.items():
        if key in known:
            _check_type(recipe, f"{path}.{key}", value, hints.get(key, Any))
        elif not open_ended:
            raise recipe.error(f"{path}.{key}", f"no such key; {nearest(key, known)}")
    for key in known:
        if signature.parameters[key].default is inspect.Parameter.empty and key not in given:
            raise recipe.error(path, f"the key {key} is missing")


def _type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # such as names that another package imports for type checkers only
        return {}


def _check_type(recipe: Recipe, path: str, value: Any, hint: Any) -> None:
    try:
        TypeAdapter(hint, config=LENIENT).validate_python(value, strict=True)
    except PydanticUserError:
        return  # an annotation that is no data: the constructor judges it
    except ValidationError as error:
        expected = "; or ".join(dict.fromkeys(problem["msg"] for problem in error.errors()[:3]))
        raise recipe.error(path, f"{expected}, got {value!r}") from None


def make_named(
    recipe: Recipe,
    section: str,
    package: str,
    *,
    name_key: str = "name",
    extra: Mapping[str, Any] | None = None,
    others: Collection[str] = (),
) -> Any:
    """Build the plugin that a section names.

    Args:
        recipe: named in the errors.
        section: the section's key.
        package: where its plugins are.
        name_key: the key that holds the plugin's name.
        extra: further arguments, which the recipe may not set.
        others: keys of the section that are somebody else's.

    Raises:
        UserError: there is no such plugin, or an argument is wrong.
    """
    given = dict(recipe.values.get(section, {}))
    name = given.pop(name_key, None)
    if not isinstance(name, str):
        raise recipe.error(section, f"give {name_key}, one of {', '.join(plugin_names(package))}")
    try:
        target = load_plugin(package, name)
    except ValueError as error:
        raise recipe.error(f"{section}.{name_key}", str(error)) from None
    known = [*parameters(target, extra or ()), *others]
    for key in given:
        if others and key not in known:
            raise recipe.error(f"{section}.{key}", f"no such key; {nearest(key, known)}")
    own = {key: value for key, value in given.items() if key not in others}
    return make(recipe, section, target, own, extra or {})


def make(
    recipe: Recipe,
    path: str,
    target: Callable[..., Any],
    given: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """Check arguments, then construct; what the constructor rejects names the section.

    Args:
        recipe: named in the errors.
        path: dotted key of ``given``.
        target: the constructor.
        given: the recipe's arguments.
        extra: further arguments, which the recipe may not set.

    Raises:
        UserError: an argument is unknown, missing, of a wrong type or out of range.
    """
    extra = extra or {}
    injected: Collection[str] = extra.keys()
    check_arguments(recipe, path, given, target, injected)
    with naming(recipe, path):
        return target(**given, **extra)


@contextmanager
def naming(recipe: Recipe, path: str) -> Iterator[None]:
    """Turn whatever is raised inside into one line that names a file and a dotted key."""
    try:
        yield
    except UserError:
        raise
    except REJECTED as error:
        raise recipe.error(path, str(error)) from error
    except (Exception, SystemExit) as error:  # a constructor is anyone's code
        raise recipe.error(path, described(error)) from error
