"""What surrounds a run in its process: signals, and what other libraries say."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from huggingface_hub.utils.tqdm import enable_progress_bars
from transformers.utils import logging as transformers_logging

from lightning_qrl.errors import first_line

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes of a shell
STOPPING = b"qrl: stopping after this rollout phase; again to stop at once\n"


@contextmanager
def quiet() -> Iterator[None]:
    """Without advice of Lightning that does not fit rollouts, its banner of devices, and bars.

    The bars are those of transformers, for weights read and written; downloads keep theirs.
    """
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
            warnings.filterwarnings("ignore", ".*The number of training batches.*")
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated.*", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


class StopRequest:
    """What SIGINT (Ctrl-C) or SIGTERM has asked for.

    Attributes:
        exit_code: of a process that does it, as of a shell; None as long as nothing was asked.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: the first signal is kept for whoever looks, a second one exits."""
        if self.exit_code is not None:
            raise SystemExit(128 + number)
        self.exit_code = 128 + number
        with suppress(OSError):  # nobody may be listening
            os.write(2, STOPPING)  # a handler may interrupt a print, so it cannot print

    def exit_if_asked(self) -> None:
        """Leave by SystemExit with the exit code, if that was asked for."""
        if self.exit_code is not None:
            raise SystemExit(self.exit_code)


@contextmanager
def asking(request: StopRequest) -> Iterator[None]:
    """Signals ask a run to stop, and only a second one breaks it off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, request) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def not_hiding_an_error(raised: bool) -> Iterator[None]:
    """What fails while the end of a failed run is recorded does not hide why the run failed."""
    try:
        yield
    except Exception as error:
        if not raised:
            raise
        said = f"note: how the run ended could not be recorded: {first_line(error)}"
        print(said, file=sys.stderr)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not keep the run's status from being recorded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
