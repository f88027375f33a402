"""Processes on this machine."""

import os
import signal
import subprocess
from contextlib import suppress

from lightning_qrl.ablation.job import Job
from lightning_qrl.ablation.launchers import about, choose_jobs, share, wished_threads

VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalProcess:
    """A process in a session of its own, so that Ctrl-C reaches it only through its parent.

    Args:
        job: what it runs.
        environment: variables besides those of this process.
    """

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        with job.file("log").open("ab") as log:
            self._process = subprocess.Popen(
                job.command(),
                stdin=subprocess.PIPE,  # ends when this process does, however it ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Have it finish its step, save and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it and its ranks at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class LocalLauncher:
    """Runs jobs here.

    Args:
        jobs: how many at once; None for one a GPU, without any one for two cores.
    """

    def __init__(self, jobs: int | None) -> None:
        cores, self._gpus = len(os.sched_getaffinity(0)), visible_gpus()
        self.jobs = choose_jobs(jobs, cores, len(self._gpus))
        self._share = share(self.jobs, cores, len(self._gpus), wished_threads())
        self.about = about(self.jobs, self._share)
        self._running: dict[int, LocalProcess] = {}  # by its place among those at once

    def start(self, job: Job) -> LocalProcess:
        """Start a job in a place that is free."""
        free = [
            place
            for place in range(self.jobs)
            if place not in self._running or self._running[place].poll() is not None
        ]
        assert free, "more jobs than may run at once"
        gpus = gpus_at(free[0], self.jobs, self._gpus)
        given = {**job.environment(), **self._share.environment(), **gpus}
        self._running[free[0]] = LocalProcess(job, given)
        return self._running[free[0]]


def visible_gpus() -> list[str]:
    """What CUDA calls the GPUs that this process may use."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def gpus_at(place: int, jobs: int, gpus: list[str]) -> dict[str, str]:
    """The variable that gives a place its GPUs: its part of them, or one of them by turns."""
    if not gpus:
        return {}
    each = max(1, len(gpus) // jobs)
    first = place * each % len(gpus)
    return {VISIBLE: ",".join(gpus[first : first + each])}
