"""A file of letters that wait, oldest first, one a line.

Each line says by itself where it goes, so that no other line is needed to send it:

    {"to": [server, run id], "kind": "tags", "values": {...}}

Whatever befalls a disk leaves a line that cannot be read; the others still can be.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lightning_qrl.tracking.files import unwritable

Letter = dict[str, Any]
UNREADABLE = "unreadable"  # the kind of what stands for a line that cannot be read


class Address(NamedTuple):
    """Where letters go.

    Attributes:
        server: its URI, without a password, which means the same in every folder.
        run_id: the run.
    """

    server: str
    run_id: str


class Waiting:
    """The file; there as long as letters wait.

    Args:
        file: its path.
        to: the address of letters that are added.
    """

    def __init__(self, file: Path, to: Address) -> None:
        self.file, self._to = file, to
        self._sent = 0  # bytes at its start that need not be sent again

    def __bool__(self) -> bool:
        return self.file.exists() and self.file.stat().st_size > self._sent

    def add(self, letter: Letter) -> None:
        """Add a letter, synced to the disk.

        Raises:
            UserError: it cannot be written: the disk is full. The file is as it was.
        """
        append(self.file, {"to": self._to, **letter})

    def read(self) -> Iterator[tuple[Letter, int]]:
        """The letters, each with the place where it ends; see `sent`."""
        with self.file.open("rb") as opened:
            opened.seek(self._sent)
            end = self._sent
            for line in opened:
                end += len(line)
                yield _letter(line), end

    def sent(self, end: int) -> None:
        """Note that what ends at a place has arrived; when all has, the file goes."""
        self._sent = end
        if not self:
            self.file.unlink(missing_ok=True)
            self._sent = 0


def address(file: Path) -> Address | None:
    """Where the letters of a file go; None if no line of it can be read."""
    with file.open("rb") as opened:
        for line in opened:
            if (letter := _letter(line))["kind"] != UNREADABLE:
                return Address(*letter["to"])
    return None


def append(file: Path, line: Letter) -> None:
    """Add a line to a file of JSON lines, synced to the disk, or leave the file as it was.

    Raises:
        UserError: it cannot be written: the disk is full.
    """
    before = file.stat().st_size if file.exists() else 0
    try:
        with file.open("ab+") as opened:
            opened.seek(max(before - 1, 0))
            torn = opened.read(1) not in (b"", b"\n")  # its writer was killed
            opened.write(b"\n" * torn + json.dumps(line).encode() + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        with suppress(OSError):
            os.truncate(file, before) if before else file.unlink()
        raise unwritable(file, error) from error


def _letter(line: bytes) -> Letter:
    try:
        letter: Letter = json.loads(line)
        server, run_id = letter["to"]
        texts = all(isinstance(text, str) for text in (server, run_id, letter["kind"]))
        if texts and (letter["kind"] != "metrics" or isinstance(letter["values"], list)):
            return letter
    except (ValueError, RecursionError, TypeError, KeyError):
        pass
    return {"kind": UNREADABLE, "line": line.decode(errors="backslashreplace")}
