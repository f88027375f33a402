"""Find number formats by name: every `Format` with a `name`, in every module of this package."""

import functools
import importlib
import pkgutil
import re

import lightning_qrl.formats as package
from lightning_qrl.formats.base import Format, nearest
from lightning_qrl.formats.floats import SmallFloatFormat


def get_format(name: str, **options: object) -> Format:
    """Build a number format.

    Args:
        name: one of `format_names()`.
        **options: the fields of that format's dataclass.

    Returns:
        The format: frozen, hashable, equal to any other of the same name and options.

    Raises:
        ValueError: the name, an option or an option's value is unknown; says what is allowed.
    """
    format, named = _find(name)
    allowed = [option.name for option in format.options()]
    for option in options:
        if option not in allowed:
            listed = f"options: {', '.join(allowed)}" if allowed else "it has none"
            hint = nearest(option, allowed)
            raise ValueError(f"{name} has no option {option!r}{hint} ({listed})")
    return format(**named, **options)


def format_names() -> list[str]:
    """The names of all formats, sorted; besides there is e{X}m{Y} for every small float."""
    return sorted([*_formats(), "fp8_e4m3", "fp8_e5m2"])


def _find(name: str) -> tuple[type[Format], dict[str, int]]:
    """The class of a format, and the fields that its name decides."""
    known = _formats()
    if name in known:
        return known[name], {}
    match = re.fullmatch(SmallFloatFormat.pattern, name.removeprefix("fp8_"))
    if match and (name[0] == "e" or name in format_names()):
        return SmallFloatFormat, {field: int(n) for field, n in match.groupdict().items()}
    names = format_names()
    listed = f"{', '.join(names)}, and e{{X}}m{{Y}} of at most 8 bits"
    raise ValueError(f"unknown number format {name!r}{nearest(name, names)} (known: {listed})")


@functools.cache
def _formats() -> dict[str, type[Format]]:
    """Every named format of the package's modules, by name, sorted."""
    found: dict[str, type[Format]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for member in vars(module).values():
            if not (isinstance(member, type) and issubclass(member, Format)):
                continue
            name = vars(member).get("name")
            if isinstance(name, str):
                found[name] = member
    return found
