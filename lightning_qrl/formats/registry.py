"""Find number formats by name: every `Format` with a `name`, in every module of this package."""

import functools
import importlib
import pkgutil
from dataclasses import fields

import lightning_qrl.formats as package
from lightning_qrl.formats.base import Format, nearest


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
    known = _formats()
    if name not in known:
        hint = nearest(name, known)
        raise ValueError(f"unknown number format {name!r}{hint} (known: {', '.join(known)})")
    allowed = [option.name for option in fields(known[name])]
    for option in options:
        if option not in allowed:
            listed = f"options: {', '.join(allowed)}" if allowed else "it has none"
            hint = nearest(option, allowed)
            raise ValueError(f"{name} has no option {option!r}{hint} ({listed})")
    return known[name](**options)


def format_names() -> list[str]:
    """The names of all formats, sorted."""
    return list(_formats())


@functools.cache
def _formats() -> dict[str, type[Format]]:
    """Every named format of the package's modules, by name, sorted."""
    found: dict[str, type[Format]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for member in vars(module).values():
            if not (isinstance(member, type) and issubclass(member, Format)):
                continue
            if "name" in vars(member):
                found[member.name] = member
    return dict(sorted(found.items()))
