"""A full disk: telling it from other errors, whoever hit it."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SAID = ("no space left on device", "disk is full", "disk quota exceeded", "file too large")


def full_disk(error: BaseException) -> str | None:
    """What an error says of a full disk; None if that is not what it is about.

    Libraries wrap the system's error in their own or keep its text alone, so causes are looked at.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in FULL:
            where = "" if cause.filename is None else f" ({cause.filename})"
            return f"{cause.strerror}{where}"
        lines = [line for line in str(cause).splitlines() if any(s in line.lower() for s in SAID)]
        if lines:
            return lines[0].strip()
        cause = cause.__cause__ or cause.__context__
    return None
