"""Files of a run's folder: written whole or not at all, and owned by one process."""

import os
from pathlib import Path

from lightning_qrl.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def write_text(file: Path, text: str) -> None:
    """Write a file aside and put it in place: a reader finds the old text or the new one.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    aside = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(aside, file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise unwritable(file, error) from error


def unwritable(file: Path, error: OSError) -> UserError:
    """One line for a file that cannot be written."""
    return UserError(f"{file} cannot be written: {error.strerror or error}")


def own(folder: Path) -> int | None:
    """Become the one process that writes to a run's folder, until it ends or `disown` is called.

    Returns:
        A handle for `disown`; None if another process owns the folder.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass  # a file system without locks
    return handle


def disown(handle: int | None) -> None:
    """Let another process own the folder."""
    if handle is not None:
        os.close(handle)
