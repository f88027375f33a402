"""What starts the processes of an ablation, and the share of a machine that each may take.

Jobs that run at once share the cores: each computes with cores // jobs threads, or with fewer if
``OMP_NUM_THREADS`` says so. How many threads there are can change the last bit of a sum, so a
design that is to be repeated bit for bit keeps its number of jobs.
"""

import os
from dataclasses import dataclass
from typing import Protocol

from lightning_qrl.ablation.job import Job


class Process(Protocol):
    """The process of a job."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def stop(self) -> None:
        """Have it finish its step, save and end, as on SIGTERM."""

    def kill(self) -> None:
        """End it at once."""


class Launcher(Protocol):
    """Starts processes, on this machine or elsewhere.

    Attributes:
        jobs: how many may run at once.
        about: what each of them gets, for people.
    """

    jobs: int
    about: str

    def start(self, job: Job) -> Process:
        """Start a job; what it says is added to its log."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several jobs may take.

    Attributes:
        threads: of the CPU.
        gpus: number of GPUs.
    """

    threads: int
    gpus: float

    def environment(self) -> dict[str, str]:
        """Variables that hold torch, and its compiler, to the threads."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
        return dict.fromkeys(names, str(self.threads))


def choose_jobs(jobs: int | None, cores: int, gpus: int) -> int:
    """How many jobs run at once: as many as asked for, else one a GPU, else one for two cores."""
    return jobs or gpus or max(1, cores // 2)


def wished_threads() -> int | None:
    """What ``OMP_NUM_THREADS`` says; None if it says no number."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # the outermost level
    return int(said) or None if said.isdecimal() else None


def share(jobs: int, cores: int, gpus: int, most: int | None = None) -> Share:
    """An equal share: whole threads, whole GPUs where there are enough, else parts of one.

    Args:
        jobs: how many run at once.
        cores: of the machine.
        gpus: of the machine.
        most: threads that a job takes at most; None for no limit.
    """
    threads = max(1, cores // jobs)
    return Share(min(threads, most or threads), gpus // jobs if gpus >= jobs else gpus / jobs)


def about(jobs: int, each: Share) -> str:
    """What jobs get, for people."""
    threads = f"{each.threads} thread{'s' if each.threads > 1 else ''}"
    gpus = f" and {each.gpus:.2g} GPU" if each.gpus else ""
    return (
        f"{jobs} at once, {threads}{gpus} each" if jobs > 1 else f"one at a time, {threads}{gpus}"
    )
