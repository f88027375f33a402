"""A measured curve: what was spent, and the reward that was seen there.

The rules for what measurements bring with them:

- a value that is NaN was not measured: its point is left out. An infinite value is refused;
- of several values at one x the last counts: a resumed run repeats its steps;
- points may come in any order.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_qrl.errors import UserError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Series:
    """Values y at increasing x.

    Args:
        x: what was spent: steps, rollouts, tokens, GPU hours; finite, not negative.
        y: values there; NaN where there is none.
        name: what messages call it.

    Attributes:
        x: float64 [S], strictly increasing.
        y: float64 [S], finite.

    Raises:
        UserError: lengths differ, x or y cannot be used, or no value is left.
    """

    x: Floats
    y: Floats
    name: str

    def __init__(self, x: ArrayLike, y: ArrayLike, name: str = "the series") -> None:
        at: Floats = np.asarray(x, dtype=np.float64)
        values: Floats = np.asarray(y, dtype=np.float64)
        if at.ndim != 1 or at.shape != values.shape:
            raise UserError(f"{name}: {at.shape} x and {values.shape} y: two lists of one length")
        if not np.isfinite(at).all() or (at < 0).any():
            raise UserError(f"{name}: x must be finite and not negative")
        if np.isinf(values).any():
            raise UserError(f"{name}: y is infinite at x = {at[np.isinf(values)][0]:g}")
        measured = ~np.isnan(values)
        if not measured.any():
            raise UserError(f"{name}: has no values")
        kept, last = np.unique(at[measured][::-1], return_index=True)
        object.__setattr__(self, "x", kept)
        object.__setattr__(self, "y", values[measured][::-1][last])
        object.__setattr__(self, "name", name)

    def scaled(self, factor: float) -> "Series":
        """The same values against x times a factor: steps become rollouts by n * B_p."""
        return Series(self.x * factor, self.y, self.name)


def series_from_csv(path: str | Path, x: str, y: str) -> Series:
    """Two columns of a CSV file with a header; an empty cell is a value that was not measured.

    Args:
        path: the file.
        x: name of the column of what was spent.
        y: name of the column of values.

    Raises:
        UserError: the file cannot be read, a column is missing, or a cell is no number.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened, skipinitialspace=True)
            columns = reader.fieldnames or []
            for column in (x, y):
                if column not in columns:
                    there = ", ".join(columns) or "none: the file is empty"
                    raise UserError(f"{path}: no column {column!r}; its columns are {there}")
            rows = [
                (
                    _number(row[x], path, reader.line_num, x),
                    _number(row[y], path, reader.line_num, y),
                )
                for row in reader
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read as CSV: {reason}") from None
    rows = [row for row in rows if not np.isnan(row[0])]
    return Series([row[0] for row in rows], [row[1] for row in rows], f"{path}: {y}")


def _number(cell: str | None, path: str | Path, line: int, column: str) -> float:
    try:
        return float(cell) if cell and cell.strip() else float("nan")
    except ValueError:
        raise UserError(f"{path}: line {line}: column {column!r}: {cell!r} is no number") from None
