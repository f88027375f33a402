"""Beginning the next epoch when a run goes on from the end of one.

A checkpoint is written while its epoch ends, and Lightning (2.6, when max_steps is set) would enter
that epoch again: one batch late in it, then it would end, in the middle of a rollout.
"""

from typing import Any


def begin_next_epoch(checkpoint: dict[str, Any]) -> None:
    """Let the loops of a checkpoint that was written at the end of an epoch start the next one.

    Args:
        checkpoint: Lightning's checkpoint; its loop states are changed in place.
    """
    loop = checkpoint["loops"]["fit_loop"]
    total = loop["epoch_progress"]["total"]
    if not total["ready"] == total["processed"] == total["completed"] + 1:
        return  # not the end of an epoch
    for counts in loop["epoch_progress"].values():
        counts["completed"] = counts["processed"]
    loop["epoch_loop.batch_progress"]["is_last_batch"] = False
    for name, part in loop.items():
        if name.startswith("epoch_loop."):
            _zero_current(part)


def _zero_current(progress: Any) -> None:
    """Set what was counted within the epoch to 0, at any depth."""
    if not isinstance(progress, dict):
        return
    for key, value in progress.items():
        if key == "current":
            value.update(dict.fromkeys(value, 0))
        else:
            _zero_current(value)
