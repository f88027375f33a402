"""MLflow's client for a server that answers, and the runs that it knows."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from lightning_qrl.errors import UserError
from lightning_qrl.tracking.reach import alone, check_answers, one_line, sqlite_file

DEFAULT_URI = "sqlite:///mlflow.db"


def tracking_uri(uri: str | None) -> str:
    """This server, else that of the environment, else a sqlite file here."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def connect(uri: str) -> Any:
    """A client of a server; a sqlite file that is not there is made.

    Raises:
        UserError: the server does not answer.
    """
    check_answers(uri)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    with one_line(uri), alone(sqlite_file(uri)):
        from mlflow import MlflowClient  # takes seconds

        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


def connect_to_read(uri: str, run: str) -> Any:
    """A client of a server that should know a run; no sqlite file is made to find that out.

    Raises:
        UserError: the server does not answer, or there is no such file.
    """
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        raise UserError(f"no run {run}: there is no {file}; set MLFLOW_TRACKING_URI")
    return connect(uri)


def find_run(client: Any, uri: str, run: str) -> Any:
    """A run, by its id, its name (the newest of that name) or its folder's name.

    Raises:
        UserError: there is no such run.
    """
    name = run.replace("'", "")
    for query in (
        f"attributes.run_id = '{name}'",
        f"attributes.run_name = '{name}'",
        f"tags.`qrl.folder` LIKE '%/{name}'",
    ):
        with one_line(uri):
            for found in search(client, query):
                return found
    raise UserError(f"no run {run} at {uri}")


def search(client: Any, query: str) -> Sequence[Any]:
    """The newest run that a query finds, if any."""
    experiments = [e.experiment_id for e in client.search_experiments()]
    found: Sequence[Any] = client.search_runs(experiments, query, max_results=1)
    return found
