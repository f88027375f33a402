"""Conducting an ablation: start its jobs, see how they end, and leave a record of all of it.

What a job came to is read from MLflow alone: whatever is not FINISHED there is to be done, by this
process or by the next one that is started with the same command. So nothing is kept that could be
lost when this process is killed.
"""

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from lightning_qrl.ablation.job import Job
from lightning_qrl.ablation.launchers import Launcher, Process
from lightning_qrl.errors import UserError
from lightning_qrl.reports.ablation import Cell, Key, Screen, Standing
from lightning_qrl.tracking.family import Child, Family

POLL_SECONDS = 0.25
RETRY_SECONDS = 10.0  # while the tracking server is away
LOOK_SECONDS = 2.0  # between two looks at the logs


class Signals:
    """Counts what asks this process to stop: Ctrl-C, SIGTERM, and the end of its session."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count instead of stopping at once."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count, self.last = self.count + 1, number
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)  # a shell may pass on what the kernel sent too
            _leave_the_terminal()


def _leave_the_terminal() -> None:
    """What is printed to a terminal that was closed raises OSError: print it nowhere."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def find_standing(title: str, jobs: Sequence[Job], family: Family) -> Standing:
    """Where an ablation stands before anything of it is started.

    Args:
        title: for the screen.
        jobs: all of them.
        family: their runs in MLflow.

    Raises:
        UserError: the server does not answer.
    """
    members = family.members()
    finished = {key: _cell(run) for key, run in members.items() if run.status == "FINISHED"}
    cells = {job.key: finished.get(job.key, Cell()) for job in jobs}
    arms, seeds = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    return Standing(title, arms, seeds, cells)


class Conductor:
    """Runs the jobs of an ablation.

    Args:
        jobs: all of them.
        standing: where they stand.
        launcher: starts them.
        family: their runs in MLflow.
        signals: stop it.

    Attributes:
        standing: where they stand now.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        standing: Standing,
        launcher: Launcher,
        family: Family,
        signals: Signals,
    ) -> None:
        self._jobs = {job.key: job for job in jobs}
        self.standing = standing
        self._launcher, self._family = launcher, family
        self._signals, self._screen = signals, Screen()
        self._obeyed = 0  # signals that the processes were told of
        self._running: dict[Key, Process] = {}
        self._written: dict[Key, int] = {}  # bytes in the log when the process was started
        self._began, self._had = time.monotonic(), self._parts()
        self._looked = self._record_at = 0.0

    def run(self) -> bool:
        """Run until all have ended, or until a signal stops it.

        Returns:
            Whether all have ended.

        Raises:
            UserError: what was stopped could not be recorded.
        """
        waiting = [job for key, job in self._jobs.items() if not self.standing.cells[key].ended]
        try:
            with self._screen:
                while self._running or (waiting and not self._signals.count):
                    while waiting and not self._signals.count and self._has_room():
                        self._start(waiting.pop(0))
                    self._obey()
                    self._settle()
                    self._look()
                    time.sleep(POLL_SECONDS)
        finally:
            for process in self._running.values():  # an error of our own: none goes on unseen
                process.stop()
        return not waiting and not self._signals.count

    def _has_room(self) -> bool:
        return len(self._running) < self._launcher.jobs

    def _start(self, job: Job) -> None:
        self._written[job.key] = job.log_size()
        self._running[job.key] = self._launcher.start(job)
        self._set(job.key, Cell("running"))

    def _obey(self) -> None:
        """Stop what runs at the first signal, kill it at the second."""
        if self._signals.count == self._obeyed:
            return
        self._obeyed = self._signals.count
        for process in self._running.values():
            if self._obeyed > 1:
                process.kill()
            else:
                process.stop()

    def _settle(self) -> None:
        """Record what has ended; while the server is away, try again now and then."""
        if time.monotonic() < self._record_at:
            return
        ended = {key: code for key, p in self._running.items() if (code := p.poll()) is not None}
        for key, code in ended.items():
            try:
                cell = self._judge(key, code)
                self._family.tidy()
            except UserError as error:
                if self._signals.count:
                    raise
                print(f"qrl: {error}; trying again", file=sys.stderr, flush=True)
                self._record_at = time.monotonic() + RETRY_SECONDS
                return
            del self._running[key]
            self._set(key, cell)
            self._standing_now()
            if cell.ended:
                self._screen.tell(self.standing, key)

    def _judge(self, key: Key, code: int) -> Cell:
        """What came of a process that has ended."""
        job = self._jobs[key]
        if code == 0:
            self._family.catch_up(job.stem.parent.parent)
        child = self._family.members().get(key)
        if child is not None and child.status == "FINISHED":
            return _cell(child)
        if self._signals.count:
            self._family.kill(key)
            return Cell()
        error = _signal(code) or job.last_words(self._written[key]) or f"exit code {code}"
        self._family.fail(key, job.run_name, job.tags, error)
        return Cell("failed", error=error)

    def _look(self) -> None:
        """See in the logs how far each is, now and then."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        for key in self._running:
            job = self._jobs[key]
            self._set(key, Cell("running", part=min(1.0, job.step() / job.steps)))
        self._standing_now()
        self._screen.show(self.standing)
        self._looked = time.monotonic()

    def _set(self, key: Key, cell: Cell) -> None:
        self.standing.cells[key] = cell

    def _standing_now(self) -> None:
        """Estimate the time left from what was done since this process began."""
        done = self._parts() - self._had
        took = time.monotonic() - self._began
        left = (len(self._jobs) - self._parts()) * took / done if done > 0 else None
        self.standing = replace(self.standing, seconds_left=left)

    def _parts(self) -> float:
        return sum(1.0 if cell.ended else cell.part for cell in self.standing.cells.values())


def _cell(child: Child) -> Cell:
    return Cell("done", child.held_out)


def _signal(code: int) -> str:
    """What signal ended a process, if one did; it has no words of its own on that."""
    names = {number.value: number.name for number in signal.Signals}
    number = -code if code < 0 else code - 128  # a process that was asked ends as a shell says it
    return f"ended by {names[number]}" if number in names else ""
