"""Processes on a Ray cluster: each job is a task, with its share of the cluster.

The task does nothing but start the very process that runs a job on one machine, so the numbers are
the same. What follows: every node sees this folder and this installation under the same paths, and
reaches the same tracking server. A cluster that is running is used (``RAY_ADDRESS``, or one on this
machine); else one is started here.

Checked with Ray 2.60 on one machine.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_qrl.ablation.job import SAYS, Job
from lightning_qrl.ablation.launchers import about, choose_jobs, share, wished_threads
from lightning_qrl.errors import UserError

POLL_SECONDS = 0.25


class RayTask:
    """A job as a task.

    Args:
        ray: the module.
        job: what it runs.
        task: the remote result.
    """

    def __init__(self, ray: Any, job: Job, task: Any) -> None:
        self._ray, self._job, self._task = ray, job, task

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs or waits for its share."""
        if not self._ray.wait([self._task], timeout=0)[0]:
            return None
        try:
            code: int = self._ray.get(self._task)
        except self._ray.exceptions.TaskCancelledError:
            return -signal.SIGTERM
        except self._ray.exceptions.RayError as error:  # a node that went away
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            with self._job.file("log").open("a", encoding="utf-8") as log:
                log.write(f"{SAYS}the Ray task was lost: {reason}\n")
            return 1
        return code

    def stop(self) -> None:
        """Have its process finish its step, save and end."""
        self._ray.cancel(self._task)

    def kill(self) -> None:
        """End its worker; the process sees its standard input end."""
        self._ray.cancel(self._task, force=True)


class RayLauncher:
    """Runs jobs on a Ray cluster.

    Args:
        jobs: how many at once; None for one a GPU, without any one for two cores.
        uri: tracking server.

    Raises:
        UserError: Ray is not installed, there is no cluster at ``RAY_ADDRESS``, or several nodes
            would have to share a sqlite file.
    """

    def __init__(self, jobs: int | None, uri: str) -> None:
        try:
            import ray as module
        except ImportError:
            message = "Ray is not installed; install lightning-qrl[ray]"
            raise UserError(f"--launcher ray: {message}") from None
        ray: Any = module
        self._ray = ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"--launcher ray: {reason}") from None
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) > 1 and uri.startswith("sqlite"):
            raise UserError(
                f"--launcher ray: {len(nodes)} nodes cannot share {uri}; start `mlflow server` and "
                "set MLFLOW_TRACKING_URI"
            )
        has = ray.cluster_resources()
        cores, gpus = int(has.get("CPU", 1)), int(has.get("GPU", 0))
        self.jobs = choose_jobs(jobs, cores, gpus)
        self._share = share(self.jobs, cores, gpus, wished_threads())
        self.about = f"on Ray, {about(self.jobs, self._share)}"

    def start(self, job: Job) -> RayTask:
        """Hand a job to the cluster."""
        resources = {"num_cpus": self._share.threads, "num_gpus": self._share.gpus}
        remote = self._ray.remote(max_retries=0, **resources)(run_command)
        environment = {**job.environment(), **self._share.environment()}
        told = job.command(), str(job.file("log")), os.getcwd(), environment
        return RayTask(self._ray, job, remote.remote(*told))


def run_command(
    command: Sequence[str], log: str, folder: str, environment: Mapping[str, str]
) -> int:
    """Run a job's process in a worker, to its end.

    Returns:
        Its exit code.
    """
    with Path(log).open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # ends when this worker does, however it ends
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        while process.poll() is None:  # Ray cannot interrupt one long wait
            time.sleep(POLL_SECONDS)
        return process.wait()
    except KeyboardInterrupt:  # what Ray raises in a task that is cancelled
        process.terminate()
        return process.wait()
