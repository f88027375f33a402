"""The process of one run of an ablation: ``python -m lightning_qrl.ablation.child JOB.json``.

It finds out by itself where it stands: nothing to do if its run is finished, else on from the
newest sound checkpoint of the run that was broken off, else anew. So it may be killed at any moment
and started again. A lock keeps a second process off while one whose parent was killed still saves
its last step.

It must not outlive whoever started it: its standard input is a pipe that nothing is written to, and
at its end the process stops as on SIGTERM.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_qrl.ablation.job import SAYS
from lightning_qrl.ablation.locks import held
from lightning_qrl.errors import UserError

if TYPE_CHECKING:
    from lightning_qrl.launch import Origin
    from lightning_qrl.recipe import Recipe

GRACE_SECONDS = 120  # to finish a step and save it
ORIGIN = "QRL_ABLATION_ORIGIN"  # tells further ranks which checkpoint the first one chose


def main(job: Path) -> int:
    """Run a job; what it fails with is the last line that it says.

    Returns:
        The exit code.
    """
    try:
        if ORIGIN in os.environ:  # a further rank, which Lightning started for the first
            return _run(job, os.environ[ORIGIN])
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        with held(job.with_suffix(".lock"), wait=True):
            return _run(job)
    except UserError as error:
        print(f"{SAYS}{error}", flush=True)
        return 2
    except Exception as error:  # whatever an arm fails with is a result
        traceback.print_exc()
        text = (str(error).strip() or "no message").splitlines()[0]
        print(f"{SAYS}{type(error).__name__}: {text}", file=sys.stderr, flush=True)
        return 1


def _stop_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _run(job: Path, chosen: str | None = None) -> int:
    """Train, or find that there is nothing to do.

    Args:
        job: the file that tells what.
        chosen: path of the checkpoint to go on from, empty for none; None to look for one.
    """
    import torch

    from lightning_qrl.launch import find_origin, launch
    from lightning_qrl.recipe import load_recipe
    from lightning_qrl.tracking import tags
    from lightning_qrl.tracking.family import Family

    torch.set_num_interop_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    told: dict[str, Any] = json.loads(job.read_text("utf-8"))
    recipe = replace(load_recipe(str(job.with_suffix(".yaml"))), name=told["recipe"])
    own = told["tags"]
    if chosen is None:
        family = Family(None, told["experiment"], told["parent"])
        before = family.members().get((own[tags.ARM], int(own[tags.SEED])))
        if before is not None and before.status == "FINISHED":
            return 0
        origin = _newest_sound(recipe, before.folder if before else None)
        os.environ[ORIGIN] = str(origin.checkpoint) if origin else ""
    else:
        origin = find_origin(chosen, None) if chosen else None
    return launch(recipe, origin, own).exit_code


def _newest_sound(recipe: "Recipe", folder: Path | None) -> "Origin | None":
    """The newest checkpoint in a run's folder that the run can go on from."""
    from lightning_qrl.launch import check, find_origin
    from lightning_qrl.launch.checkpoints import FOLDER, newest_first

    for file in [] if folder is None else newest_first(folder / FOLDER):
        try:
            origin = find_origin(str(file), None)
            check(recipe, origin)
        except UserError as error:
            print(f"not continued from {file.name}: {error}", flush=True)
        else:
            return origin
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
