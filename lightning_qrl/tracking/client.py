"""MLflow's client for a server that answers, and the runs that it knows."""

import difflib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_qrl.errors import UserError
from lightning_qrl.tracking.reach import (
    alone,
    be_brief,
    check_answers,
    one_line,
    shown,
    sqlite_file,
)
from lightning_qrl.tracking.tags import FOLDER

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
    be_brief()
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    for noisy in ("alembic", "mlflow.tracking"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it shows tracebacks
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


def absolute(uri: str) -> str:
    """A server's URI that means the same in every working directory, without its password."""
    file = sqlite_file(uri)
    return shown(uri) if file is None else f"sqlite:///{file.absolute()}"


def experiment_id(client: Any, uri: str, name: str) -> str:
    """The id of an experiment, which is made if it is not there.

    Raises:
        UserError: it was deleted.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            made: str = client.create_experiment(name)
            return made
        except MlflowException as error:  # another process may have been faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise UserError(f"MLflow at {shown(uri)}: experiment {name!r}: {error}") from None
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"MLflow at {shown(uri)}: experiment {name!r} was deleted; set tracking.experiment, or "
            f"bring it back: mlflow experiments restore --experiment-id {found.experiment_id}"
        )
    id: str = found.experiment_id
    return id


def last_steps(client: Any, run_id: str) -> dict[str, int]:
    """The last step of each metric of a run."""
    keys = client.get_run(run_id).data.metrics
    return {key: max(m.step for m in client.get_metric_history(run_id, key)) for key in keys}


def create_run(client: Any, uri: str, experiment: str, name: str, tags: dict[str, str]) -> str:
    """Make a run in an experiment, which is made if it is not there; the run's id."""
    with one_line(uri):
        where = experiment_id(client, uri, experiment)
        id: str = client.create_run(where, tags=tags, run_name=name).info.run_id
    return id


def find_run(client: Any, uri: str, run: str) -> Any:
    """A run, by its id, its name (the newest of that name) or its folder's name.

    Raises:
        UserError: there is no such run; the message gives the nearest names.
    """
    with one_line(uri):
        if (found := look_up(client, run)) is not None:
            return found
        infos = [found.info for found in search(client, count=RECENT)]
    names = [info.run_name or info.run_id for info in infos]  # an old server may give no name
    raise UserError(f"no run {run} at {shown(uri)}; {near_names(run, names) or 'it has no runs'}")


def look_up(client: Any, run: str) -> Any | None:
    """The same, or None."""
    # MLflow's filters have no escapes: of a name with both quotes one is a wildcard, as % and _ are
    quote = "'" if "'" not in run else '"'
    name = run.replace(quote, "_")
    for query, said in (
        (f"attributes.run_id = {quote}{name}{quote}", lambda found: found.info.run_id),
        (f"attributes.run_name LIKE {quote}{name}{quote}", lambda found: found.info.run_name),
        (f"tags.`qrl.folder` LIKE {quote}%/{name}{quote}", _folder_name),
    ):
        for found in search(client, query, RECENT):
            if said(found) == run:
                return found
    return None


def _folder_name(run: Any) -> str:
    return str(run.data.tags[FOLDER]).rpartition("/")[2]


def near_names(name: str, known: Iterable[str]) -> str:
    """A clause for an error message: known names, the nearest first; empty if none is known."""
    names = difflib.get_close_matches(name, dict.fromkeys(known), NEAR, cutoff=0.0)
    return f"the nearest are {', '.join(names)}" if names else ""


def search_all(client: Any, experiments: Sequence[str], query: str) -> list[Any]:
    """All runs of some experiments that a query finds, page after page."""
    runs, token = [], None
    while True:
        page = client.search_runs(list(experiments), query, max_results=RECENT, page_token=token)
        runs += page
        if not (token := page.token):
            return runs


def search(client: Any, query: str = "", count: int = 1) -> Sequence[Any]:
    """The newest runs that a query finds, if any."""
    experiments = [e.experiment_id for e in client.search_experiments()]
    found: Sequence[Any] = client.search_runs(experiments, query, max_results=count)
    return found
