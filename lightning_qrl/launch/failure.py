"""When a run fails: one line for the person, and all that is known in the run's folder.

Whatever ends a run, a mistake in a recipe, somebody's callback, or a fault of ours, its traceback
is kept in the artefact `FILE`, and the tag ``qrl.error`` says it in one line.
"""

import traceback
from collections.abc import Mapping

from lightning_qrl.errors import UserError, described
from lightning_qrl.launch.process import not_hiding_an_error
from lightning_qrl.tracking import MLflowRun
from lightning_qrl.tracking import tags as tags_
from lightning_qrl.tracking.letters import ARTIFACTS

FILE = "error.txt"


def told_of(error: Exception, record: MLflowRun, callbacks: Mapping[str, object]) -> Exception:
    """Record why a run failed, and give what to tell the person.

    Args:
        error: what it failed with.
        record: the run.
        callbacks: by their keys in the recipe; one that the traceback passes through is named.

    Returns:
        The error itself if it tells its own remedy, or could not be recorded; else a `UserError`
        that says where the traceback is.
    """
    culprits = _passed_through(error, callbacks)
    said = described(error)
    for key in culprits:
        error.add_note(f"raised in callbacks.{key}")
        said += f" (raised in callbacks.{key})"
    if not record.begun:
        return (
            error if isinstance(error, UserError) else UserError(f"run {record.run_name}: {said}")
        )
    told: Exception = error
    with not_hiding_an_error(True):
        record.set_tags({tags_.ERROR: described(error)})
        record.log_text("".join(traceback.format_exception(error)), FILE)
        if not isinstance(error, UserError):
            file = record.run_folder / ARTIFACTS / FILE
            told = UserError(f"run {record.run_name}: {said}; traceback: {file}")
    return told


def _passed_through(error: Exception, callbacks: Mapping[str, object]) -> list[str]:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames]
    return [key for key, callback in callbacks.items() if any(callback is o for o in owners)]
