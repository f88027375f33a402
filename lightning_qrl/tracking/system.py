"""What the machine does while a run goes: MLflow's own monitors, under MLflow's names.

CPU, memory, disk, network and, where there is one, the GPU are sampled by a thread, at an interval
that fits short runs: the first sample is taken at once and a last one at the end. (MLflow's own
thread samples every 10 seconds, logs nothing of a run that is shorter, and speaks to the server by
itself.) As with MLflow, the step of a sample is its number, not the optimizer's step; a resumed run
goes on counting.

    system/cpu_utilization_percentage, system/system_memory_usage_megabytes,
    system/disk_usage_percentage, system/network_receive_megabytes,
    system/gpu_0_utilization_percentage, ...
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

PREFIX = "system/"
FIRST = 0.1  # seconds that the first sample's CPU utilization is over


def check_seconds(seconds: float) -> None:
    """Raise ValueError for an interval that is none."""
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"system_metrics_seconds: expected 0 or more: {seconds}")


class SystemMonitor:
    """Samples the machine until it is stopped.

    Args:
        seconds: between two samples.
        log: takes the metrics of a sample and its number; called by the thread, or by `stop`.
        first: number of the first sample.
    """

    def __init__(
        self, seconds: float, log: Callable[[Mapping[str, float], int], None], first: int = 0
    ) -> None:
        self._seconds, self._log, self._number = seconds, log, first
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take the last sample and end."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            monitors = _monitors()
            self._stopped.wait(FIRST)
            self._sample(monitors)
            while not self._stopped.wait(self._seconds):
                self._sample(monitors)
            self._sample(monitors)
        except Exception as error:  # a run is not to fail for want of its thermometer
            print(f"qrl: no more system metrics: {error}", file=sys.stderr, flush=True)

    def _sample(self, monitors: list[Any]) -> None:
        values: dict[str, float] = {}
        for monitor in monitors:
            monitor.collect_metrics()
            values |= {PREFIX + key: value for key, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        self._log(values, self._number)
        self._number += 1


def _monitors() -> list[Any]:
    import psutil
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    psutil.cpu_percent()  # the next one is over the time since this one
    monitors = []
    for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        try:
            monitors.append(kind())
        except Exception as error:  # no GPU, no network, or no package that asks them
            logging.getLogger(__name__).debug("no metrics of %s: %s", kind.__name__, error)
    return monitors
