"""MLflow, and only here: one run of training is one run in MLflow.

What Lightning's own MLflow logger does not do: default to sqlite (the file store is gone since
MLflow 3.13), keep parameters of up to 6000 characters, continue a run without logging a step twice,
and tell FAILED from KILLED.

A resumed run repeats the steps since its checkpoint. They are the same steps, so their metrics are
already there, and what is not newer than the last recorded step of a metric is not logged again.
"""

import logging
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_qrl.errors import UserError

Status = Literal["FINISHED", "FAILED", "KILLED"]
DEFAULT_URI = "sqlite:///mlflow.db"
ANSWER_SECONDS = 5.0
PARAM_LIMIT = 6000  # characters of a value that MLflow stores
PARAMS_PER_BATCH = 100


class MLflowRun(Logger):
    """A run in MLflow, as a Lightning logger.

    Args:
        experiment: name of the experiment; made if it is not there.
        run_name: name of the run.
        uri: tracking server; by default ``MLFLOW_TRACKING_URI``, else a sqlite file here.
        folder: folder of run folders, in which checkpoints are kept.

    Raises:
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
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
        self.experiment_name = experiment
        self.run_name = run_name
        self.root = Path(folder)
        self.run_id = ""
        self._client: Any = None
        self._logged_until: dict[str, int] = {}

    @rank_zero_only
    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Create the run and its folder, with parameters and tags."""
        self._connect()
        _check_writable(self.root)
        with _one_line(self.uri):
            experiment = self._client.get_experiment_by_name(self.experiment_name)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(self.experiment_name)
            )
            run = self._client.create_run(experiment_id, tags=dict(tags), run_name=self.run_name)
            self.run_id = run.info.run_id
            self._log_params(params)
            self._client.set_tag(self.run_id, "qrl.folder", str(self.run_folder.resolve()))
        self.run_folder.mkdir(parents=True)

    @rank_zero_only
    def resume(self, run_id: str) -> None:
        """Continue a run: it is running again, and what it has recorded stays as it is."""
        self._connect()
        with _one_line(self.uri):
            run = self._client.get_run(run_id)
            self.run_id, self.run_name = run_id, run.info.run_name
            self._client.update_run(run_id, status="RUNNING")
            for key in run.data.metrics:
                history = self._client.get_metric_history(run_id, key)
                self._logged_until[key] = max(metric.step for metric in history)

    def find(self, run: str) -> tuple[str, Path]:
        """Id and folder of a run, by its id or name (the newest of that name).

        Raises:
            UserError: there is no such run, or it is none of ours.
        """
        self._connect()
        with _one_line(self.uri):
            experiments = [e.experiment_id for e in self._client.search_experiments()]
            for query in (f"attributes.run_id = '{run}'", f"attributes.run_name = '{run}'"):
                for found in self._client.search_runs(experiments, query, max_results=1):
                    folder = found.data.tags.get("qrl.folder")
                    if folder is None:
                        raise UserError(f"run {run} was not made by qrl: it has no tag qrl.folder")
                    return found.info.run_id, Path(folder)
        raise UserError(f"no run {run} at {self.uri}")

    def _connect(self) -> None:
        if self._client is not None:
            return
        _check_answers(self.uri)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        from mlflow import MlflowClient  # takes seconds

        with _one_line(self.uri):
            self._client = MlflowClient(tracking_uri=self.uri)
            self._client.search_experiments(max_results=1)

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        entries = [Param(key, str(value)[:PARAM_LIMIT]) for key, value in params.items()]
        for first in range(0, len(entries), PARAMS_PER_BATCH):
            batch = entries[first : first + PARAMS_PER_BATCH]
            self._client.log_batch(self.run_id, params=batch)

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric

        assert step is not None, "every metric belongs to a step"
        now = int(time.time() * 1000)
        entries = [
            Metric(key, float(value), now, step)
            for key, value in metrics.items()
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
        """Append rows to a table artefact; all columns have the same length."""
        self._client.log_table(self.run_id, dict(columns), artifact)

    @rank_zero_only
    def finish(self, status: Status) -> None:
        """Set the final status of the run."""
        if self.run_id:
            self._client.set_terminated(self.run_id, status=status)

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved recipe was logged by `start`."""

    @property
    def run_folder(self) -> Path:
        """The run's folder: checkpoints and the trained policy."""
        return self.root / self.version

    @property
    @override
    def name(self) -> str:
        return ""

    @property
    @override
    def version(self) -> str:
        return f"{self.run_name}-{self.run_id[:8]}"

    @property
    @override
    def save_dir(self) -> str:
        return str(self.root)


def git_tags(folder: Path) -> dict[str, str]:
    """Commit of the checkout that a folder is in, and whether it has changes; empty outside one."""

    def git(*args: str) -> str | None:
        command = ["git", "-C", str(folder), *args]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None  # no git on this machine
        return done.stdout.strip() if done.returncode == 0 else None

    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    if commit is None:
        return {}
    return {"qrl.git_commit": commit, "qrl.git_dirty": str(bool(changes)).lower()}


class _one_line:
    """Turns what MLflow raises into one line that names the server."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if isinstance(error, (MlflowException, SQLAlchemyError)):
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"MLflow at {self.uri}: {reason}") from error


def _check_answers(uri: str) -> None:
    """Ask a server once, briefly: MLflow's own client would retry for minutes."""
    if not uri.startswith(("http://", "https://")):
        return
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=ANSWER_SECONDS)
    except requests.RequestException as error:
        raise UserError(
            f"MLflow at {uri} does not answer ({type(error).__name__}); start it, or unset "
            "MLFLOW_TRACKING_URI to record in a local file"
        ) from error


def _check_writable(folder: Path) -> None:
    """Fail before anything is written if run folders cannot be made here."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"output folder {folder} cannot be written ({existing}); set tracking.folder"
        )
