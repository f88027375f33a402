"""``KEY=VALUE`` and ``KEY=a..b`` of `qrl simulate`: read as recipes' overrides are."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_qrl.errors import UserError

RANGE = re.compile(r"\s*(-?\d+)\.\.(-?\d+)\s*")
LIKE_RANGE = re.compile(r"[\w.]\.\.[\w-]|\w\.\.|^\s*\.\.\d")  # and no path, as ../lengths
MOST = 10_000  # runs of a sweep


def read_assignments(texts: Sequence[str], known: Collection[str] | None = None) -> dict[str, Any]:
    """Values by key; dotted keys make mappings.

    Args:
        texts: ``key=value``, the value in YAML.
        known: the keys that there are; None: somebody else checks them.

    Raises:
        UserError: one is malformed, its key is unknown, or given twice.
    """
    if not texts:
        return {}
    from lightning_qrl.recipe import parse_overrides

    keys = [text.partition("=")[0].strip() for text in texts]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"command line: {key} is given twice; take one of them out")
    values = parse_overrides(texts)
    check_keys(values, known)
    return values


def check_keys(values: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Raise UserError for a key that there is not."""
    from lightning_qrl.plugins import nearest

    for key in values:
        if known is not None and key not in known:
            raise UserError(f"command line: {key}: no such setting; {nearest(key, [*known])}")


def read_axes(texts: Sequence[str], known: Collection[str] | None = None) -> dict[str, list[Any]]:
    """Values of each setting of a sweep: whole numbers from ``a..b``, else those of a list.

    Args:
        texts: ``key=a..b`` or ``key=v1,v2``.
        known: the keys that there are; None: somebody else checks them.

    Raises:
        UserError: one is malformed, its key is unknown, or there would be too many runs.
    """
    axes: dict[str, list[Any]] = {}
    count = 1
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not (equals and key and values.strip()):
            raise UserError(f"--sweep {text}: write key=a..b or key=v1,v2")
        if key in axes:
            raise UserError(f"--sweep {key} is given twice; take one of them out")
        if known is not None:
            check_keys({key: None}, known)
        axes[key] = _values(key, values, MOST // count)
        count *= len(axes[key])
    return axes


def _values(key: str, text: str, most: int) -> list[Any]:
    if found := RANGE.fullmatch(text):
        first, last = (int(found[i]) for i in (1, 2))
        if last < first:
            raise UserError(f"--sweep {key}={text}: it ends before it begins")
        _check_count(key, last - first + 1, most)
        return list(range(first, last + 1))
    if LIKE_RANGE.search(text):
        raise UserError(
            f"--sweep {key}={text}: a..b takes two whole numbers; list other values, as in "
            f"{key}=v1,v2"
        )
    from lightning_qrl.ablation.factors import split_values
    from lightning_qrl.recipe import parse_overrides

    try:
        values = split_values(text)
    except ValueError as error:
        raise UserError(f"--sweep {key}: {error}, got {text}") from None
    _check_count(key, len(values), most)
    return [parse_overrides([f"value={value}"])["value"] for value in values]


def _check_count(key: str, count: int, most: int) -> None:
    if count > most:
        raise UserError(f"--sweep {key}: more than {MOST} runs in all; take fewer values")
