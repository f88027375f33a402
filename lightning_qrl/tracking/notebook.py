"""Reading runs back from MLflow, made by us or not: tags, parameters, whole histories, texts."""

import re
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_qrl.errors import UserError
from lightning_qrl.tracking import tags
from lightning_qrl.tracking.client import connect, look_up, near_names, search, search_all
from lightning_qrl.tracking.histories import History, read_histories
from lightning_qrl.tracking.reach import one_line, shown, sqlite_file

__all__ = ["History", "RecordedRun", "Selection", "is_made_up", "select_runs"]

DEFAULT_EXPERIMENT = "lightning_qrl"
DESIGN = "design.json"  # of an ablation, at its parent
MADE_UP = re.compile(r"([a-z]+)-([a-z]+)-\d{1,4}")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as MLflow holds it, made by us or not.

    Attributes:
        id: the run's id.
        name: its name.
        experiment: name of its experiment.
        status: RUNNING, FINISHED, FAILED or KILLED.
        tags: its tags, those of MLflow too.
        params: its parameters.
        started: seconds since 1970.
        ended: the same; None while it runs.
        link: where its page is, if the server has pages; else empty.
        metrics: by name, those that were asked for and that it has.
        texts: artefacts by their paths, those that were asked for and that it has.
    """

    id: str
    name: str
    experiment: str
    status: str
    tags: dict[str, str]
    params: dict[str, str]
    started: float
    ended: float | None
    link: str = ""
    metrics: dict[str, History] = field(default_factory=dict, repr=False)
    texts: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Selection:
    """Runs that were found, not yet read.

    Attributes:
        title: what was asked for.
        uri: the server.
        parents: ids of the parent runs that were named.
        metrics: names of all that any of the runs has logged.
    """

    title: str
    uri: str
    parents: tuple[str, ...]
    metrics: frozenset[str]
    _client: Any = field(repr=False)
    _found: tuple[Any, ...] = field(repr=False)

    def read(self, metrics: Collection[str], texts: Sequence[str] = ()) -> list[RecordedRun]:
        """The runs, oldest first.

        Args:
            metrics: names; a run that lacks one has no history of it.
            texts: paths of artefacts; the same.
        """
        logged = {
            run.info.run_id: [name for name in metrics if name in run.data.metrics]
            for run in self._found
        }
        with one_line(self.uri):
            histories = read_histories(self._client, self.uri, logged)
            experiments = {e.experiment_id: e.name for e in self._client.search_experiments()}
            runs = [
                RecordedRun(
                    id=(identity := run.info.run_id),
                    name=run.info.run_name or identity,  # an old server may give no name
                    experiment=experiments.get(run.info.experiment_id, ""),
                    status=run.info.status,
                    tags=dict(run.data.tags),
                    params=dict(run.data.params),
                    started=run.info.start_time / 1000,
                    ended=run.info.end_time and run.info.end_time / 1000,
                    link=_link(self.uri, run.info.experiment_id, identity),
                    metrics=histories[identity],
                    texts=dict(self._texts(run.info.artifact_uri, texts)) if texts else {},
                )
                for run in self._found
            ]
        return sorted(runs, key=lambda run: run.started)

    def design(self) -> str:
        """The design of the ablation that was named, as JSON; empty if there is not one."""
        if len(self.parents) != 1:
            return ""
        with one_line(self.uri):
            parent = self._client.get_run(self.parents[0])
            if tags.DESIGN not in parent.data.tags:
                return ""
            try:
                return dict(self._texts(parent.info.artifact_uri, [DESIGN])).get(DESIGN, "")
            except OSError:  # its artefacts are out of reach from here
                return ""

    def attach(self, folder: Path, path: str) -> None:
        """Store the files of a folder as artefacts of the parents, under a path.

        Raises:
            UserError: the server does not take them.
        """
        for parent in self.parents:
            with one_line(self.uri):
                self._client.log_artifacts(parent, str(folder), path)

    def _texts(self, artifacts: str, wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        # not by the client, which looks the run up again for every file
        repository: Any = get_artifact_repository(artifacts, tracking_uri=self.uri)
        there = {file.path for file in repository.list_artifacts()}
        with tempfile.TemporaryDirectory() as folder:
            for path in there & set(wanted):
                file = Path(repository.download_artifacts(path, folder))
                yield path, file.read_text(encoding="utf-8", errors="replace")


def is_made_up(name: str) -> bool:
    """Whether MLflow made up the name of a run, such as ``bold-fox-123``."""
    found = MADE_UP.fullmatch(name)
    if found is None:
        return False
    from mlflow.utils import name_utils

    return found[1] in name_utils._GENERATOR_PREDICATES and found[2] in name_utils._GENERATOR_NOUNS


def select_runs(uri: str, names: Sequence[str]) -> Selection:
    """Find runs by the names of experiments, of parent runs (their children) or of runs.

    A run's id does as well as its name. Left out are runs that were deleted, that another was made
    in place of, and parents.

    Args:
        uri: tracking server.
        names: none: the newest ablation, else the experiment `DEFAULT_EXPERIMENT`.

    Raises:
        UserError: the server does not answer, or there is nothing of such a name; the message gives
            the nearest names.
    """
    file = sqlite_file(uri)
    if file is not None:
        _check_has_runs(file)
    client = connect(uri)
    with one_line(uri):
        chosen = names or [_newest(client)]
        titles: list[str] = []
        parents: list[str] = []
        found: dict[str, Any] = {}
        for name in dict.fromkeys(chosen):
            title, parent, runs = _find(client, uri, name)
            titles.append(title)
            parents += [parent] if parent else []
            found.update({run.info.run_id: run for run in runs if _counts(run)})
    for parent in {run.data.tags.get(tags.MLFLOW_PARENT, "") for run in found.values()}:
        found.pop(parent, None)
    if not found:
        raise UserError(f"{', '.join(titles)} at {shown(uri)} has no runs yet")
    metrics = frozenset(name for run in found.values() for name in run.data.metrics)
    title = ", ".join(titles)
    return Selection(title, uri, tuple(parents), metrics, client, tuple(found.values()))


def _check_has_runs(file: Path) -> None:
    """Before MLflow opens a database, in which it would make tables that are not there."""
    if not file.exists():
        raise UserError(f"no runs: there is no {file}; set MLFLOW_TRACKING_URI")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error:
        return  # `connect` says what is wrong with it
    if "runs" not in tables:
        raise UserError(f"{file} has no runs; set MLFLOW_TRACKING_URI")


def _counts(run: Any) -> bool:
    own = run.data.tags
    return tags.REPLACED_BY not in own and own.get(tags.KIND) != tags.ABLATION


def _newest(client: Any) -> str:
    ablations = search(client, f"tags.`{tags.KIND}` = '{tags.ABLATION}'")
    return ablations[0].info.run_id if ablations else DEFAULT_EXPERIMENT


def _find(client: Any, uri: str, name: str) -> tuple[str, str, list[Any]]:
    """Title, a parent's id or nothing, and runs."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None and experiment.lifecycle_stage == "active":
        return f"experiment {name}", "", search_all(client, [experiment.experiment_id], "")
    run = look_up(client, name)
    experiments = {e.experiment_id: e.name for e in client.search_experiments()}
    if run is None:
        known = [*experiments.values(), *(run.info.run_name for run in search(client, count=1000))]
        near = near_names(name, filter(None, known))
        raise UserError(
            f"no experiment and no run {name} at {shown(uri)}; {near or 'it has no runs'}"
        )
    identity, title = run.info.run_id, run.info.run_name or run.info.run_id
    children = search_all(client, list(experiments), f"tags.`{tags.MLFLOW_PARENT}` = '{identity}'")
    return title, identity if children else "", children or [run]


def _link(uri: str, experiment: str, run: str) -> str:
    if not uri.startswith(("http://", "https://")):
        return ""
    return f"{shown(uri).rstrip('/')}/#/experiments/{experiment}/runs/{run}"
