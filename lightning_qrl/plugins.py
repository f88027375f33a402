"""Finding a plugin by its name: one plugin, one module, one object named like it.

A loss, a task, a rollout engine or a callback is added by adding a file; its file name is the name
that recipes use (``bf16_tail``), and the class or function in it is named like the file, whatever
the capitals (`BF16Tail`). Nothing is registered anywhere, so nothing has to be edited to add one.
"""

import difflib
import importlib
import pkgutil
import re
from typing import Any


def plugin_names(package: str) -> list[str]:
    """Names of the plugins in a package: its public modules, sorted, ``base`` left out."""
    paths = importlib.import_module(package).__path__
    found = (module.name for module in pkgutil.iter_modules(paths))
    return sorted(name for name in found if not name.startswith("_") and name != "base")


def nearest(name: str, known: list[str]) -> str:
    """A clause for an error message: the nearest known names, or all of them when none is near."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(known) if known else 'none'}"


def load_plugin(package: str, name: str) -> Any:
    """The class or function of a plugin.

    Args:
        package: the package that holds the plugins, e.g. ``"lightning_qrl.tasks"``.
        name: the plugin's name, e.g. ``"arithmetic"``.

    Raises:
        ValueError: there is no such plugin (the message gives the nearest names), or its module
            defines nothing of its name.
    """
    known = plugin_names(package)
    if name not in known:
        kind = package.rsplit(".", 1)[-1]
        raise ValueError(f"{name!r} is not in {kind}; {nearest(name, known)}")
    module = importlib.import_module(f"{package}.{name}")
    wanted = name.replace("_", "")
    for key, value in vars(module).items():
        if not key.startswith("_") and key.replace("_", "").lower() == wanted:
            return value
    raise ValueError(f"{module.__name__} defines no class or function named like it")


def snake_case(name: str) -> str:
    """``BF16Tail`` becomes ``bf16_tail``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
