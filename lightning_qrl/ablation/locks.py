"""Locks on files, which end with the process that holds them, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(file: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock, if it can be had.

    Args:
        file: made if it is not there.
        wait: until another process lets go of it.

    Yields:
        Whether it is held.
    """
    with file.open("ab") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
