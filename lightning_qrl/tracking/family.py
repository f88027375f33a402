"""An ablation in MLflow: a parent run that holds the design, and a child run for each arm and seed.

A child that was broken off is continued where its checkpoints allow it, else made anew. What counts
of several runs of one arm and seed is the finished one, else the newest; `tidy` writes that down,
so that whoever reads the children later counts each once.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_qrl.errors import UserError
from lightning_qrl.tracking import tags
from lightning_qrl.tracking.client import (
    absolute,
    connect,
    experiment_id,
    search_all,
    tracking_uri,
)
from lightning_qrl.tracking.outbox import send_leftovers
from lightning_qrl.tracking.reach import one_line
from lightning_qrl.tracking.run import Status

HELD_OUT = "eval/reward"


@dataclass(frozen=True, slots=True)
class Child:
    """A run of one arm with one seed.

    Attributes:
        run_id: in MLflow.
        status: RUNNING, FINISHED, FAILED or KILLED.
        started: milliseconds since 1970.
        folder: where its checkpoints are; None if it ended before it had one.
        held_out: the newest held-out reward; None before there is one.
        error: the line that it failed with; else empty.
        replaced: whether another run was made in its place.
    """

    run_id: str
    status: str
    started: int
    folder: Path | None
    held_out: float | None
    error: str
    replaced: bool


Members = dict[tuple[str, int], Child]  # by arm and seed


class Family:
    """The runs of an ablation.

    Args:
        uri: tracking server; None for the usual one.
        experiment: name of the experiment.
        parent: id of the parent run; empty before `open`.

    Raises:
        UserError: the server does not answer; so for every method.
    """

    def __init__(self, uri: str | None, experiment: str, parent: str = "") -> None:
        self.uri = tracking_uri(uri)
        self.experiment = experiment
        self.parent = parent
        self._client: Any = connect(self.uri)

    def folder(self, design: str) -> Path | None:
        """The folder that the parent of a design records; None if there is no such parent."""
        with one_line(self.uri):
            found = self._parents(design)
        return _folder(found[0]) if found else None

    def open(self, name: str, own: Mapping[str, str]) -> bool:
        """Make the parent run, or continue the one of the same design.

        Args:
            name: of a new parent.
            own: its tags, with the design's.

        Returns:
            Whether it was there.

        Raises:
            UserError: another process has made it at this very moment.
        """
        design = own[tags.DESIGN]
        with one_line(self.uri):
            if found := self._parents(design):
                there = _folder(found[0])
                if there is not None and str(there) != own[tags.FOLDER] and there.is_dir():
                    raise UserError(_started_elsewhere(there))
                self.parent = found[0].info.run_id
                self._client.set_tag(self.parent, tags.FOLDER, own[tags.FOLDER])
                self._client.update_run(self.parent, status="RUNNING")
                return True
            given = {**own, tags.KIND: tags.ABLATION}
            run = self._client.create_run(self._experiment_id(), tags=given, run_name=name)
            if (first := self._parents(design)[0]).info.run_id != run.info.run_id:
                self._client.delete_run(run.info.run_id)
                raise UserError(_started_elsewhere(_folder(first)))
            self.parent = run.info.run_id
        return False

    def describe(self, texts: Mapping[str, str]) -> None:
        """Store artefacts of the parent by their paths."""
        with one_line(self.uri):
            for path, text in texts.items():
                self._client.log_text(self.parent, text, path)

    def close(self, status: Status) -> None:
        """Set the final status of the parent."""
        with one_line(self.uri):
            self._client.set_terminated(self.parent, status=status)

    def members(self) -> Members:
        """The run that counts of every arm and seed that has one."""
        return {key: max(runs, key=_counts) for key, runs in self._children().items()}

    def catch_up(self, root: Path) -> None:
        """Send what children in a folder of runs could not, because the server was away."""
        send_leftovers(self._client, absolute(self.uri), root)

    def tidy(self) -> None:
        """Mark each run that another one counts instead of; what has finished has no error."""
        for runs in self._children().values():
            counting = max(runs, key=_counts)
            for run in runs:
                if run is not counting:
                    self._replace(run, counting)
            if counting.status == "FINISHED" and counting.error:
                with one_line(self.uri):
                    self._client.delete_tag(counting.run_id, tags.ERROR)

    def fail(self, key: tuple[str, int], name: str, own: Mapping[str, str], error: str) -> None:
        """Record that a child failed; in a run made for that if it died before it had one.

        Args:
            key: its arm and seed.
            name: of a run made for it.
            own: tags of such a run.
            error: the line that it failed with.
        """
        child = self.members().get(key)
        with one_line(self.uri):
            if child is None:
                made = self._client.create_run(self._experiment_id(), tags=dict(own), run_name=name)
                run_id = made.info.run_id
            else:
                run_id = child.run_id
            self._client.set_tag(run_id, tags.ERROR, error)
            self._client.set_terminated(run_id, status="FAILED")

    def kill(self, key: tuple[str, int]) -> None:
        """Record that a child was stopped, if it could not do so itself."""
        child = self.members().get(key)
        if child is not None and child.status == "RUNNING":
            with one_line(self.uri):
                self._client.set_terminated(child.run_id, status="KILLED")

    def _experiment_id(self) -> str:
        return experiment_id(self._client, self.uri, self.experiment)

    def _parents(self, design: str) -> list[Any]:
        """The parents of a design, the oldest first; there is one."""
        query = f"tags.`{tags.DESIGN}` = '{design}' and tags.`{tags.KIND}` = '{tags.ABLATION}'"
        found = search_all(self._client, [self._experiment_id()], query)
        return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))

    def _replace(self, run: Child, by: Child) -> None:
        with one_line(self.uri):
            self._client.set_tag(run.run_id, tags.REPLACED_BY, by.run_id)
            if run.status == "RUNNING":
                self._client.set_terminated(run.run_id, status="KILLED")

    def _children(self) -> dict[tuple[str, int], list[Child]]:
        """All runs that none was made in the place of, by arm and seed."""
        found = defaultdict(list)
        with one_line(self.uri):
            query = f"tags.`{tags.PARENT}` = '{self.parent}'"
            for run in search_all(self._client, [self._experiment_id()], query):
                child, own = _child(run), run.data.tags
                if not child.replaced:
                    found[own[tags.ARM], int(own[tags.SEED])].append(child)
        return found


def _started_elsewhere(folder: Path | None) -> str:
    return f"this ablation has just been started elsewhere, in {folder}; start it again to look"


def _folder(run: Any) -> Path | None:
    folder = run.data.tags.get(tags.FOLDER)
    return None if folder is None else Path(folder)


def _child(run: Any) -> Child:
    return Child(
        run_id=run.info.run_id,
        status=run.info.status,
        started=run.info.start_time,
        folder=_folder(run),
        held_out=run.data.metrics.get(HELD_OUT),
        error=run.data.tags.get(tags.ERROR, ""),
        replaced=tags.REPLACED_BY in run.data.tags,
    )


def _counts(child: Child) -> tuple[bool, int]:
    """The order in which runs of one arm and seed count."""
    return child.status == "FINISHED", child.started
