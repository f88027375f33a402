"""What starts the processes of an ablation, and the share of a machine that each may take.

Jobs that run at once share the cores: each computes with cores // jobs threads. How many threads
there are can change the last bit of a sum, so a design that is to be repeated bit for bit keeps its
number of jobs.
"""

from dataclasses import dataclass
from typing import Protocol

from lightning_qrl.ablation.job import Job
from lightning_qrl.errors import UserError


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
    """How many jobs run at once: as many as asked for, else one a GPU, else one for two cores.

    Raises:
        UserError: it is less than 1.
    """
    if jobs is None:
        return gpus or max(1, cores // 2)
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    return jobs


def share(jobs: int, cores: int, gpus: int) -> Share:
    """An equal share: whole threads, whole GPUs where there are enough, else parts of one."""
    return Share(max(1, cores // jobs), gpus // jobs if gpus >= jobs else gpus / jobs)


def about(jobs: int, each: Share) -> str:
    """What jobs get, for people."""
    threads = f"{each.threads} thread{'s' if each.threads > 1 else ''}"
    gpus = f" and {each.gpus:.2g} GPU" if each.gpus else ""
    return (
        f"{jobs} at once, {threads}{gpus} each" if jobs > 1 else f"one at a time, {threads}{gpus}"
    )
