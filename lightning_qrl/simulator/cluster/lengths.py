"""How many tokens completions have.

The length of a completion follows from the seed and the completion's number, never from the order
of events: two clusters with one seed do the same work (common random numbers), so that what differs
between them is theirs. Numbers are drawn in blocks, each from a generator of its own.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_qrl.simulator.cluster.checks import check_numbers, written

BLOCK = 4096
LONGEST = 1_000_000_000  # tokens


class Lengths(Protocol):
    """A distribution of lengths."""

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Tokens of ``count`` completions [count], each at least 1."""


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """Lognormal lengths, or one length where the spread is 0.

    Attributes:
        mean: tokens, before the limit cuts.
        spread: coefficient of variation.
        limit: tokens at which a completion is cut.

    Raises:
        ValueError: a value is out of range.
    """

    mean: float = 2000.0
    spread: float = 0.8
    limit: int = 8192

    def __post_init__(self) -> None:
        check_numbers(self, {"mean": (1, LONGEST), "spread": (0, 10), "limit": (1, LONGEST)})
        if not self.spread and self.mean > self.limit:
            raise ValueError(
                f"mean={self.mean:g} is more than limit={self.limit}, so that every completion is "
                "cut; raise limit"
            )

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """See `Lengths`."""
        variance = math.log1p(self.spread**2)  # of the logarithm
        center = math.log(self.mean) - variance / 2
        drawn = np.exp(center + math.sqrt(variance) * random.standard_normal(count))
        return np.clip(np.rint(drawn), 1, self.limit).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Empirical:
    """Lengths that were measured, drawn with replacement.

    Attributes:
        values: tokens of each completion that was measured.

    Raises:
        ValueError: there are none, or one is no whole number of at least 1.
    """

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if isinstance(self.values, str) or not isinstance(self.values, tuple | list):
            raise ValueError(f"values is a list of whole numbers, got {written(self.values)}")
        if not self.values:
            raise ValueError("values is empty; give the tokens of at least one completion")
        for value in self.values:
            if type(value) is not int or not 1 <= value <= LONGEST:
                raise ValueError(
                    f"values are whole numbers from 1 to {LONGEST}, got {written(value)}"
                )

    @classmethod
    def read(cls, file: Path) -> "Empirical":
        """Lengths of a file: whole numbers between white space, or one JSON list of them.

        Raises:
            ValueError: it cannot be read, or holds something else.
        """
        try:
            text = file.read_text()
            numbers = json.loads(text) if text.lstrip().startswith("[") else text.split()
            return cls(values=tuple(int(number) for number in numbers))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{file} holds no token counts: {error}") from None

    @cached_property
    def _values(self) -> NDArray[np.int64]:
        return np.array(self.values, dtype=np.int64)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """See `Lengths`."""
        return random.choice(self._values, count)


class Stream:
    """The lengths of completions 0, 1, 2, .., read forwards.

    Args:
        lengths: their distribution.
        seed: at least 0.
    """

    def __init__(self, lengths: Lengths, seed: int) -> None:
        self._lengths, self._seed = lengths, seed
        self._block: list[int] = []
        self._number = 0

    def next(self) -> int:
        """Tokens of the next completion."""
        place = self._number % BLOCK
        if not place:
            random = np.random.default_rng((self._seed, self._number // BLOCK))
            self._block = self._lengths.draw(random, BLOCK).tolist()
        self._number += 1
        return self._block[place]
