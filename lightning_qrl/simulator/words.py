"""How a value is written where a user gives it: as YAML has it, not as Python does."""

from typing import Any


def plain(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
