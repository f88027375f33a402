"""Letters to a server that goes away and comes back: all arrive, in order, none twice.

A letter is sent at once. If the server does not take it, it is appended to a file beside the run,
synced to the disk, and so is every letter after it until the file has been sent. That is tried
again with a growing pause, also a multiple of what a try takes, so that training hardly waits:

    pause = min(max(2 x the last pause, 10 x the try), 60 s)

What a server may have heard is sent again from the start of the file: see `letters` for why that
changes nothing. A letter that will never be taken does not hold up the others; it goes to a file of
its own, with the reason.

There are two such files, since MLflow keeps artefacts elsewhere than the rest, and one may be out
of reach without the other. Parameters, metrics, tags and the status do not wait for artefacts;
artefacts wait for them, as they build on them. Artefacts that are not taken by the end of a run,
when all else is, are given up: they are in the run's folder.

The files outlive their run: the next run that starts in the same folder of runs sends what waits
there, once the process that wrote it is gone (`send_leftovers`).
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_qrl.errors import UserError, first_line
from lightning_qrl.tracking.files import disown, own
from lightning_qrl.tracking.letters import STORED, Letter, check_takes_letters, deliver, merged
from lightning_qrl.tracking.reach import takes_writes
from lightning_qrl.tracking.refusals import Refused, Unreachable
from lightning_qrl.tracking.waiting import UNREADABLE, Address, Waiting, address, append

FILE, ARTEFACTS = "outbox.jsonl", "outbox_artefacts.jsonl"  # in a run's folder
REFUSED = "refused.jsonl"
SHORTEST, LONGEST = 0.5, 60.0  # seconds between two tries
CALM = 10.0  # times as long as a try took
AT_ONCE = 2.0  # seconds of sending what waits before training goes on
AT_THE_END = 10.0  # seconds of trying before a run ends
LEFTOVERS = 30.0  # seconds for what other runs have left


class Lane:
    """Letters that wait for one another.

    Args:
        waiting: keeps what is not taken.
        deliver: sends a letter, or raises Unreachable or Refused.
        set_aside: takes what was refused, and why.

    Attributes:
        why: the last letter was not taken.
    """

    def __init__(
        self,
        waiting: Waiting,
        deliver: Callable[[Letter], None],
        set_aside: Callable[[Letter, str], None],
    ) -> None:
        self.waiting, self._deliver, self._set_aside = waiting, deliver, set_aside
        self._pause, self._next_try = 0.0, 0.0
        self.why = ""

    def send(self, letter: Letter) -> None:
        """Deliver a letter, or keep it."""
        if self.waiting or not self._try(letter):
            self.waiting.add(letter)

    def send_waiting(
        self, seconds: float, give_up: Callable[[], bool] | None = None, *, early: bool = False
    ) -> None:
        """Send what waits, as far as the time goes.

        Args:
            seconds: the time.
            give_up: whether what is not taken now never will be.
            early: before the pause after the last try is over, too.
        """
        if not (self.waiting and (early or time.monotonic() >= self._next_try)):
            return
        until = time.monotonic() + seconds
        files: set[str] = set()  # an artefact is sent as it is now, so once is enough
        for letter, end in merged(self.waiting.read()):
            path = str(letter.get("path", ""))
            if path not in files and not self._try(letter):
                if give_up is None or not give_up():
                    return
                self._set_aside(letter, self.why)
            if path:
                files.add(path)
            self.waiting.sent(end)
            if time.monotonic() > until:
                return

    def _try(self, letter: Letter) -> bool:
        began = time.monotonic()
        try:
            if letter["kind"] == UNREADABLE:
                raise Refused("a line cannot be read")
            self._deliver(letter)
        except Unreachable as error:
            self.why = str(error)
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


class Outbox:
    """The letters of one run. May be used by several threads.

    Args:
        client: MLflow's.
        uri: the server; another run must be able to find it from another folder.
        run_id: the run.
        folder: the run's folder, which this process owns.
    """

    def __init__(self, client: Any, uri: str, run_id: str, folder: Path) -> None:
        self.uri, self.run_id, self.folder = uri, run_id, folder
        self._client = client
        self._lock = threading.RLock()
        self._refused = False
        self._records, self._artefacts = (
            Lane(Waiting(folder / name, Address(uri, run_id)), self._deliver, self._set_aside)
            for name in (FILE, ARTEFACTS)
        )

    @property
    def waiting(self) -> Path | None:
        """The file of letters that have not arrived, if there is one."""
        lanes = self._records, self._artefacts
        return next((lane.waiting.file for lane in lanes if lane.waiting), None)

    def send(self, letter: Letter) -> None:
        """Deliver a letter now, or keep it.

        Raises:
            UserError: the server is away, and the letter cannot be kept: the disk is full.
        """
        with self._lock:
            before = self.waiting
            if letter["kind"] not in STORED:
                self._records.send(letter)
            elif self._records.waiting:
                self._artefacts.waiting.add(letter)
            else:
                self._artefacts.send(letter)
            if before is None and self.waiting:
                self._say_away(self.waiting)
            self._send_waiting(AT_ONCE)

    def close(self, seconds: float | None = None) -> bool:
        """Try for a while to send what waits; say where it is if that fails.

        Returns:
            Whether nothing waits.
        """
        until = time.monotonic() + (AT_THE_END if seconds is None else seconds)
        with self._lock:
            while self.waiting and (left := until - time.monotonic()) > 0:
                self.send_all(left)
                if self.waiting:
                    time.sleep(min(SHORTEST, left))
            if self.waiting:
                where = f"{self.waiting} is sent when the next run starts in {self.folder.parent}"
                _say(f"MLflow at {self.uri} is still away; {where}")
        return not self.waiting

    def send_all(self, seconds: float) -> None:
        """Send what waits, as far as the time goes, and give artefacts up that are not taken."""
        with self._lock:
            self._send_waiting(seconds, self._takes_letters, early=True)

    def _send_waiting(
        self, seconds: float, give_up: Callable[[], bool] | None = None, *, early: bool = False
    ) -> None:
        if not self.waiting:
            return
        until = time.monotonic() + seconds
        self._records.send_waiting(seconds, early=early)
        if not self._records.waiting:
            self._artefacts.send_waiting(until - time.monotonic(), give_up, early=early)
        if self.run_id and not self.waiting:
            what = "the rest of what it missed" if self._refused else "what it missed"
            _say(f"MLflow at {self.uri} is back, and has {what} of run {self.run_id}")

    def _deliver(self, letter: Letter) -> None:
        if not takes_writes(self.uri):
            raise Unreachable("the database is locked or gone")
        deliver(self._client, self.run_id, self.folder, letter)

    def _takes_letters(self) -> bool:
        try:
            check_takes_letters(self._client, self.run_id, self.folder)
        except (Unreachable, Refused):
            return False
        return True

    def _say_away(self, file: Path) -> None:
        if self._records.waiting:
            what = f"is away ({self._records.why})"
        else:
            what = f"cannot store artefacts ({self._artefacts.why})"
        _say(f"MLflow at {self.uri} {what}; {file} keeps what it misses")

    def _set_aside(self, letter: Letter, why: str) -> None:
        file = self.folder / REFUSED
        if not self._refused:
            what = f"MLflow at {self.uri} refuses a part of run {self.run_id} ({why})"
            if letter["kind"] == UNREADABLE:
                what = f"a line of what {self.folder} has for MLflow cannot be read"
            _say(f"{what}; it is in {file}")
        self._refused = True
        append(file, {**letter, "refused": why})


def send_leftovers(client: Any, uri: str, root: Path) -> None:
    """Send what runs whose process is gone have left in a folder of runs, while MLflow takes it.

    Whatever is wrong with it is said and left: it is another run's.
    """
    until = time.monotonic() + LEFTOVERS
    for folder in sorted({f.parent for name in (FILE, ARTEFACTS) for f in root.glob(f"*/{name}")}):
        left = until - time.monotonic()
        try:
            if left > 0:
                _send_leftover(client, uri, folder, left)
        except (OSError, UserError) as error:
            _say(f"what {folder} has for MLflow could not be sent: {first_line(error)}")


def _send_leftover(client: Any, uri: str, folder: Path, seconds: float) -> None:
    handle = own(folder)
    if handle is None:
        return
    try:
        there = [file for name in (FILE, ARTEFACTS) if (file := folder / name).exists()]
        to = next(filter(None, map(address, there)), Address(uri, ""))
        if to.server == uri:
            Outbox(client, uri, to.run_id, folder).send_all(seconds)
    finally:
        disown(handle)


def _say(line: str) -> None:
    print(f"qrl: {line}", file=sys.stderr, flush=True)
