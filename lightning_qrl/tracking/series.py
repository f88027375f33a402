"""A metric of a recorded run, step by step, for whoever analyses it."""

import numpy as np
from numpy.typing import NDArray

from lightning_qrl.errors import UserError
from lightning_qrl.tracking.client import connect_to_read, find_run, near_names, tracking_uri
from lightning_qrl.tracking.histories import LARGEST
from lightning_qrl.tracking.reach import one_line, shown


def read_series(
    uri: str | None, run: str, metric: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps, ascending, and the values of a metric there; of a step logged twice the last counts.

    Args:
        uri: tracking server; None: ``MLFLOW_TRACKING_URI``, else the sqlite file here.
        run: id, name (the newest of that name) or folder's name of any run, made by us or not.
        metric: its name in MLflow, such as ``train/reward``.

    Raises:
        UserError: there is no such server, run or metric.
    """
    uri = tracking_uri(uri)
    client = connect_to_read(uri, run)
    found = find_run(client, uri, run)
    if metric not in found.data.metrics:
        there = near_names(metric, found.data.metrics) or "it has no metrics"
        raise UserError(f"run {run} at {shown(uri)}: no metric {metric!r}; {there}")
    with one_line(uri):
        history = client.get_metric_history(found.info.run_id, metric)
    history = sorted(history, key=lambda entry: (entry.step, entry.timestamp))
    by_step = {entry.step: entry.value for entry in history}
    values = np.array(list(by_step.values()))
    values = np.where(np.abs(values) >= LARGEST, np.copysign(np.inf, values), values)
    return np.array(list(by_step), dtype=np.float64), values
