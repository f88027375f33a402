"""A run in MLflow, as a Lightning logger.

What Lightning's own MLflow logger does not do: default to sqlite (the file store is gone since
MLflow 3.13), keep parameters of up to 6000 characters, continue a run without logging a step twice,
tell FAILED from KILLED, and say within seconds that a server does not answer.

A resumed run repeats the steps since its checkpoint. They are the same steps, so their metrics are
already there, and what is not newer than the last recorded step of a metric is not logged again.
"""

import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_qrl.errors import UserError
from lightning_qrl.tracking.client import (
    connect,
    connect_to_read,
    find_run,
    search,
    tracking_uri,
)
from lightning_qrl.tracking.reach import check_writable, one_line, sqlite_file

Status = Literal["FINISHED", "FAILED", "KILLED"]
PARAM_LIMIT = 6000  # characters of a value that MLflow stores
KEY_LIMIT = 250  # characters of a name
PER_BATCH = 100  # parameters that MLflow takes at once


class MLflowRun(Logger):
    """A run in MLflow, as a Lightning logger.

    Args:
        experiment: name of the experiment; made if it is not there.
        run_name: name of the run.
        uri: tracking server; by default ``MLFLOW_TRACKING_URI``, else a sqlite file here.
        folder: folder of run folders, in which checkpoints are kept.

    Raises:
        ValueError: a name is empty.
        UserError: `start` cannot write to the folder or reach the server; nothing is left behind.
    """

    def __init__(
        self,
        experiment: str = "lightning_qrl",
        run_name: str = "run",
        uri: str | None = None,
        folder: str = "runs",
    ) -> None:
        super().__init__()
        if not experiment.strip() or not run_name.strip():
            raise ValueError("experiment and run_name must not be empty")
        self.uri = tracking_uri(uri)
        self.experiment_name = experiment
        self.run_name = run_name
        self.root = Path(folder).absolute()
        self.run_folder = self.root / folder_name(run_name, "")  # checkpoints, trained policy
        self.run_id = ""
        self._client: Any = None
        self._logged_until: dict[str, int] = {}

    @rank_zero_only
    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Create the run and its folder, with parameters and tags."""
        check_writable(self.root, "set tracking.folder")
        self._client = self._client or connect(self.uri)
        with one_line(self.uri):
            experiment = self._client.get_experiment_by_name(self.experiment_name)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(self.experiment_name)
            )
            run = self._client.create_run(experiment_id, tags=dict(tags), run_name=self.run_name)
            self.run_id = run.info.run_id
            self._make_folder(self.root / folder_name(self.run_name, self.run_id[:8]))
            self._log_params(params)

    @rank_zero_only
    def resume(self, run_id: str) -> bool:
        """Continue a run: it is running again, and what it has recorded stays as it is.

        Returns:
            Whether this server knows the run; if not, nothing happens.
        """
        file = sqlite_file(self.uri)
        if file is not None and not file.exists():
            return False
        self._client = self._client or connect(self.uri)
        with one_line(self.uri):
            if not search(self._client, f"attributes.run_id = '{run_id}'"):
                return False
            run = self._client.get_run(run_id)
            folder = Path(run.data.tags["qrl.folder"])
            check_writable(folder, "the run's folder must be there to continue it")
            self.run_id, self.run_name = run_id, run.info.run_name
            self._client.update_run(run_id, status="RUNNING")
            self._make_folder(folder)
            for key in run.data.metrics:
                history = self._client.get_metric_history(run_id, key)
                self._logged_until[key] = max(metric.step for metric in history)
        return True

    def find(self, run: str) -> Path:
        """The folder of a run, by its id, its name (the newest of that name) or its folder's name.

        Raises:
            UserError: there is no such run, or it is none of ours.
        """
        self._client = self._client or connect_to_read(self.uri, run)
        folder = find_run(self._client, self.uri, run).data.tags.get("qrl.folder")
        if folder is None:
            raise UserError(f"run {run} was not made by qrl: it has no tag qrl.folder")
        return Path(folder)

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_folder = folder
        self._client.set_tag(self.run_id, "qrl.folder", str(folder))

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        values = {mlflow_key(key): str(value)[:PARAM_LIMIT] for key, value in params.items()}
        entries = [Param(key, value) for key, value in values.items()]
        for first in range(0, len(entries), PER_BATCH):
            self._client.log_batch(self.run_id, params=entries[first : first + PER_BATCH])

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric

        assert step is not None, "every metric belongs to a step"
        now = int(time.time() * 1000)
        entries = [
            Metric(key, float(value), now, step)
            for key, value in ((mlflow_key(key), value) for key, value in metrics.items())
            if key != "epoch" and step > self._logged_until.get(key, -1)
        ]
        self._client.log_batch(self.run_id, metrics=entries)

    @rank_zero_only
    def log_text(self, text: str, artifact: str) -> None:
        """Store a text under an artefact path."""
        self._client.log_text(self.run_id, text, artifact)

    @rank_zero_only
    def log_json(self, value: Any, artifact: str) -> None:
        """Store plain containers as a JSON artefact."""
        self._client.log_dict(self.run_id, value, artifact)

    @rank_zero_only
    def log_table(self, columns: Mapping[str, Sequence[Any]], artifact: str) -> None:
        """Add rows to a table artefact, in place of the rows of the same steps.

        (MLflow's own `log_table` appends, which doubles what a resumed run repeats, and reads the
        older rows back through pandas, which makes the completion ``"095"`` the number 95.)

        Args:
            columns: by name, all of one length; one of them is ``step``.
            artifact: path of the table, ending in ``.json``.
        """
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        names = list(columns)
        at = names.index("step")
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        steps = {row[at] for row in rows}
        older = [row for row in self._table_rows(artifact) if row[at] not in steps]
        self.log_json({"columns": names, "data": older + rows}, artifact)
        listed = json.dumps([{"path": artifact, "type": "table"}])
        self._client.set_tag(self.run_id, MLFLOW_LOGGED_ARTIFACTS, listed)

    def _table_rows(self, artifact: str) -> list[list[Any]]:
        if artifact not in [file.path for file in self._client.list_artifacts(self.run_id)]:
            return []
        with tempfile.TemporaryDirectory() as folder:
            file = self._client.download_artifacts(self.run_id, artifact, folder)
            rows: list[list[Any]] = json.loads(Path(file).read_text())["data"]
        return rows

    @rank_zero_only
    def finish(self, status: Status) -> None:
        """Set the final status of the run, if it was started."""
        if self.run_id:
            self._client.set_terminated(self.run_id, status=status)

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved recipe was logged by `start`."""

    @property
    @override
    def name(self) -> str:
        return ""

    @property
    @override
    def version(self) -> str:
        return self.run_folder.name

    @property
    @override
    def save_dir(self) -> str:
        return str(self.run_folder.parent)


def folder_name(run_name: str, suffix: str) -> str:
    """A name for a run's folder, whatever the characters of the run's name."""
    plain = re.sub(r"[^\w.-]+", "_", run_name)
    return f"{plain}-{suffix}".lstrip(".")


def mlflow_key(name: str) -> str:
    """A name that MLflow takes for a parameter or a metric: ``a@b`` becomes ``a_b``."""
    parts = (re.sub(r"[^\w\-. :]", "_", part).lstrip(".") for part in name.split("/"))
    return "/".join(part or "_" for part in parts)[:KEY_LIMIT].rstrip("/")
