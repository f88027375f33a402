"""Printing: plain text as it is, rich text with colours where a terminal wants them."""

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

    from lightning_qrl.reports.simulation_timeline import Glyphs

MOST_NOTES = 8


class Screen:
    """Standard output: how wide it is, and what it can show.

    rich leaves colours out of pipes, and where NO_COLOR is set.
    """

    def __init__(self) -> None:
        from rich.console import Console

        from lightning_qrl.reports.simulation_timeline import glyphs_for

        self._console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        self.width: int = self._console.width
        self.glyphs: Glyphs = glyphs_for(self._console.encoding)

    def show(self, *parts: "str | Iterable[Text]") -> None:
        """Print texts, each with its newline in it, and lines of rich text."""
        for part in parts:
            if isinstance(part, str):
                print(part, end="", flush=True)
            else:
                for line in part:
                    line.rstrip()
                    self._console.print(line)


def first_notes(notes: Iterable[Sequence[str]]) -> list[str]:
    """The notes on several runs, each once, and no more than can be read."""
    found = list(dict.fromkeys(note for of_run in notes for note in of_run))
    more = [f"{len(found) - MOST_NOTES} more of this kind"] if len(found) > MOST_NOTES else []
    return [*found[:MOST_NOTES], *more]


def waiting(what: str) -> AbstractContextManager[object]:
    """Say on standard error what is being done, where it is a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def show_json(values: Any) -> None:
    """Print plain values; numbers that are not finite are no JSON, and there are none."""
    json.dump(values, sys.stdout, indent=2, allow_nan=False)
    print()
