"""Values that a cluster cannot have are refused in one line that names the key and what to do."""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Range = tuple[float, float]
SHOWN = 60  # characters of a value in a message


def check_numbers(part: Any, ranges: Mapping[str, Range]) -> None:
    """Raise ValueError where a number is of the wrong kind or out of range.

    A field whose default is a whole number takes no other. None is believed where the annotation
    has it.

    Args:
        part: a dataclass.
        ranges: of each number, the least and the most.
    """
    kinds = {field.name: str(field.type) for field in fields(part)}
    for name, (least, most) in ranges.items():
        value, whole = getattr(part, name), "int" in kinds[name]
        if value is None and "None" in kinds[name]:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = "whole number" if whole else "number"
            raise ValueError(f"{name} is a {kind}, got {written(value)}")
        if whole and not isinstance(value, int):
            raise ValueError(f"{name} is a whole number, got {value}")
        if math.isnan(value) or not least <= value <= most:
            raise ValueError(f"{name} must be at least {least:g} and at most {most:g}, got {value}")


def check_flags(part: Any, *names: str) -> None:
    """Raise ValueError where a truth value is something else."""
    for name in names:
        if not isinstance(getattr(part, name), bool):
            raise ValueError(f"{name} is true or false, got {written(getattr(part, name))}")


def built(kind: Any, values: Any, where: str = "") -> Any:
    """A dataclass of these values.

    Args:
        kind: the dataclass.
        values: a mapping of its fields, or one that is built already. The text ``inf`` is the
            number, which YAML writes as ``.inf``.
        where: the key that holds them, for messages.

    Raises:
        ValueError: no mapping, an unknown key, or what the class itself refuses.
    """
    if is_dataclass(values):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{where or kind.__name__} is a mapping of keys and values, got {written(values)}"
        )
    prefix = f"{where}." if where else ""
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{prefix}{key} is unknown; {hint}")
    try:
        return kind(**{key: _number(value) for key, value in values.items()})
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def written(value: Any) -> str:
    """A value as YAML has it."""
    if isinstance(value, str):
        return f"'{value}'"
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."


def _number(value: Any) -> Any:
    return math.inf if value == "inf" else value
