"""MLflow's client for a server that answers, and the runs that it knows."""

import difflib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_qrl.errors import UserError
from lightning_qrl.tracking.reach import alone, check_answers, one_line, sqlite_file

DEFAULT_URI = "sqlite:///mlflow.db"
NEAR = 8  # names that a wrong one is answered with
RECENT = 1000  # runs, the newest, that these are looked for among


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
        UserError: there is no such run; the message gives the nearest names.
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
    with one_line(uri):
        infos = [found.info for found in search(client, count=RECENT)]
    names = [info.run_name or info.run_id for info in infos]  # an old server may give no name
    raise UserError(f"no run {run} at {uri}; {near_names(run, names) or 'it has no runs'}")


def near_names(name: str, known: Iterable[str]) -> str:
    """A clause for an error message: known names, the nearest first; empty if none is known."""
    names = difflib.get_close_matches(name, dict.fromkeys(known), NEAR, cutoff=0.0)
    return f"the nearest are {', '.join(names)}" if names else ""


def search(client: Any, query: str = "", count: int = 1) -> Sequence[Any]:
    """The newest runs that a query finds, if any."""
    experiments = [e.experiment_id for e in client.search_experiments()]
    found: Sequence[Any] = client.search_runs(experiments, query, max_results=count)
    return found
