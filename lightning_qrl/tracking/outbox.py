"""Letters to a server that goes away and comes back: all arrive, in order, none twice.

A letter is sent at once. If the server does not take it, it is appended to a file beside the run,
synced to the disk, and so is every letter after it until the file has been sent. That is tried
again with a growing pause, also a multiple of what a try takes, so that training hardly waits:

    pause = min(max(2 x the last pause, 10 x the try), 60 s)

What a server may have heard is sent again from the start of the file: see `letters` for why that
changes nothing. A letter that will never be taken does not hold up the others; it goes to a file of
its own, with the reason.

The file outlives its run: the next run that starts in the same folder of runs sends what waits
there, once the process that wrote it is gone (`send_leftovers`).
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lightning_qrl.tracking.files import disown, own, unwritable
from lightning_qrl.tracking.letters import Letter, deliver, merged
from lightning_qrl.tracking.reach import takes_writes
from lightning_qrl.tracking.refusals import Refused, Unreachable

FILE, REFUSED = "outbox.jsonl", "refused.jsonl"  # in a run's folder
SHORTEST, LONGEST = 0.5, 60.0  # seconds between two tries
CALM = 10.0  # times as long as a try took
AT_ONCE = 2.0  # seconds of sending what waits before training goes on
AT_THE_END = 10.0  # seconds of trying before a run ends
LEFTOVERS = 30.0  # seconds for what other runs have left


class Outbox:
    """The letters of one run. May be used by several threads.

    Args:
        client: MLflow's.
        uri: the server; another run must be able to find it from another folder.
        run_id: the run.
        folder: the run's folder, which this process owns.
    """

    def __init__(self, client: Any, uri: str, run_id: str, folder: Path) -> None:
        self._deliver: Callable[[Letter], None] = lambda letter: deliver(
            client, run_id, folder, letter
        )
        self.uri, self.run_id, self.folder = uri, run_id, folder
        self.file = folder / FILE
        self._lock = threading.RLock()
        self._sent = 0  # bytes of the file that have arrived
        self._pause, self._next_try = 0.0, 0.0
        self._why = ""
        self.refused = 0
        if self.waiting:
            _drop_torn_line(self.file)

    @property
    def waiting(self) -> bool:
        """Whether any letter has not arrived."""
        return self.file.exists()

    def send(self, letter: Letter) -> None:
        """Deliver a letter now, or keep it.

        Raises:
            UserError: the server is away, and the letter cannot be kept: the disk is full.
        """
        with self._lock:
            if not self.waiting:
                if self._try(letter):
                    return
                _say(
                    f"MLflow at {self.uri} is away ({self._why}); {self.file} keeps what it misses"
                )
            self._keep(letter)
            if time.monotonic() >= self._next_try:
                self._send_waiting(AT_ONCE)

    def close(self, seconds: float | None = None) -> bool:
        """Try for a while to send what waits; say where it is if that fails.

        Returns:
            Whether all has arrived.
        """
        until = time.monotonic() + (AT_THE_END if seconds is None else seconds)
        with self._lock:
            while self.waiting and (left := until - time.monotonic()) > 0:
                self._send_waiting(left)
                if self.waiting:
                    time.sleep(min(SHORTEST, left))
            if self.waiting:
                where = f"{self.file} is sent when the next run starts in {self.folder.parent}"
                _say(f"MLflow at {self.uri} is still away; {where}")
        return not self.waiting

    def _try(self, letter: Letter) -> bool:
        began = time.monotonic()
        try:
            self._deliver(letter)
        except Unreachable as error:
            self._why = str(error)
            self._wait(began)
            return False
        except Refused as error:
            self._set_aside(letter, str(error))
        self._pause = 0.0
        return True

    def _wait(self, began: float) -> None:
        now = time.monotonic()
        self._pause = min(max(2 * self._pause, SHORTEST), LONGEST)
        self._next_try = now + max(self._pause, min(CALM * (now - began), LONGEST))

    def _send_waiting(self, seconds: float) -> None:
        """Send what waits, as far as the time goes."""
        began = time.monotonic()
        if not takes_writes(self.uri):
            self._wait(began)
            return
        with self.file.open("rb") as file:
            file.seek(self._sent)
            for letter, end in merged(_read(file)):
                if letter["kind"] != "to" and not self._try(letter):
                    return
                self._sent = end
                if time.monotonic() - began > seconds:
                    return
        self.file.unlink()
        self._sent = 0
        _say(f"MLflow at {self.uri} is back, and has what it missed of run {self.run_id}")

    def _keep(self, letter: Letter) -> None:
        lines = [letter]
        if not self.waiting:
            lines.insert(0, {"kind": "to", "uri": self.uri, "run_id": self.run_id})
        _append(self.file, lines)

    def _set_aside(self, letter: Letter, why: str) -> None:
        file = self.folder / REFUSED
        if not self.refused:
            _say(
                f"MLflow at {self.uri} refuses a part of run {self.run_id} ({why}); it is in {file}"
            )
        self.refused += 1
        _append(file, [{**letter, "refused": why}])


def send_leftovers(client: Any, uri: str, root: Path) -> None:
    """Send what runs whose process is gone have left in a folder of runs, while MLflow takes it."""
    until = time.monotonic() + LEFTOVERS
    for file in sorted(root.glob(f"*/{FILE}")):
        left = until - time.monotonic()
        handle = own(file.parent) if left > 0 else None
        if handle is None:
            continue
        try:
            with file.open("rb") as opened:
                first = next(_read(opened), None)
            if first is not None and first[0].get("uri") == uri:
                Outbox(client, uri, first[0]["run_id"], file.parent)._send_waiting(left)
        finally:
            disown(handle)


def _read(file: BinaryIO) -> Iterator[tuple[Letter, int]]:
    """Letters of a file from where it stands, each with where it ends."""
    end = file.tell()
    for line in file:
        end += len(line)
        yield json.loads(line), end


def _drop_torn_line(file: Path) -> None:
    """A process that was killed while it wrote leaves half a line."""
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(file, len(whole))


def _append(file: Path, lines: list[Letter]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    try:
        with file.open("ab") as opened:
            opened.write(text.encode())
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise unwritable(file, error) from error


def _say(line: str) -> None:
    print(f"qrl: {line}", file=sys.stderr, flush=True)
