"""A run in MLflow, as a Lightning logger.

What Lightning's own MLflow logger does not do: default to sqlite (the file store is gone since
MLflow 3.13), survive a server that goes away (`outbox`), take any name and any length (`names`),
continue a run without logging a step twice, tell FAILED from KILLED, and say within seconds that a
server does not answer.

A resumed run repeats the steps since its checkpoint. They are the same steps, so their metrics are
already there, and what is not newer than the last recorded step of a metric is not logged again.

Artefacts are files in the run's folder first, and copied to MLflow from there. So nothing has to be
read back from a server to add to it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_qrl.errors import UserError
from lightning_qrl.tracking import tags as tags_
from lightning_qrl.tracking.artifacts import Artifacts
from lightning_qrl.tracking.client import (
    absolute,
    connect,
    connect_to_read,
    create_run,
    find_run,
    last_steps,
    search,
    tracking_uri,
)
from lightning_qrl.tracking.files import disown, own
from lightning_qrl.tracking.letters import Letter
from lightning_qrl.tracking.models import Policies
from lightning_qrl.tracking.names import Names, check_names, folder_name, mlflow_params, plain_tags
from lightning_qrl.tracking.outbox import LEFTOVERS, Outbox, send_leftovers
from lightning_qrl.tracking.reach import check_writable, one_line, sqlite_file
from lightning_qrl.tracking.system import PREFIX, SystemMonitor, check_seconds

Status = Literal["FINISHED", "FAILED", "KILLED"]
LogModels = Literal["none", "final", "checkpoints"]
NAMES = "names.json"  # artefact: what names meant that MLflow does not take
LOGGED_ARTIFACTS = "mlflow.loggedArtifacts"  # MLflow's tag for the tables of a run


class MLflowRun(Logger):
    """A run in MLflow, as a Lightning logger.

    Args:
        experiment: name of the experiment; made if it is not there.
        run_name: name of the run.
        uri: tracking server; by default ``MLFLOW_TRACKING_URI``, else a sqlite file here.
        folder: folder of run folders, in which checkpoints are kept.
        log_models: which policies MLflow keeps a copy of: none, the final one, or that of each
            checkpoint too (see `models` for the room that it takes).
        system_metrics_seconds: between two samples of the machine; 0 for none.

    Attributes:
        policies: writes what `log_models` asks for; whoever has the policy sets it.
        policy_sha256: of the weights that the run ended with; empty until then.

    Raises:
        ValueError: a name is empty or too long, or the seconds are negative.
        UserError: `start` cannot write to the folder or reach the server; nothing is left behind.
    """

    def __init__(
        self,
        experiment: str = "lightning_qrl",
        run_name: str = "run",
        uri: str | None = None,
        folder: str = "runs",
        log_models: LogModels = "final",
        system_metrics_seconds: float = 5.0,
    ) -> None:
        super().__init__()
        check_names(experiment, run_name)
        check_seconds(system_metrics_seconds)
        self.uri = tracking_uri(uri)
        self.experiment_name = experiment
        self.run_name = run_name
        self.log_models = log_models
        self.system_metrics_seconds = system_metrics_seconds
        self.root = Path(folder).absolute()
        self.run_folder = self.root / folder_name(run_name, "")  # checkpoints, trained policy
        self.run_id = ""
        self.policies: Policies | None = None
        self.policy_sha256 = ""
        self._client: Any = None
        self._outbox: Outbox | None = None
        self._owned: int | None = None
        self._names = Names()
        self._artifacts = Artifacts(self.run_folder)
        self._logged_until: dict[str, int] = {}
        self._tables: set[str] = set()
        self._growing: set[str] = set()
        self._system: SystemMonitor | None = None

    @rank_zero_only
    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Create the run and its folder, with parameters and tags."""
        check_writable(self.root, "set tracking.folder")
        self._client = self._client or connect(self.uri)
        send_leftovers(self._client, absolute(self.uri), self.root)
        named = self.experiment_name, self.run_name
        self.run_id = create_run(self._client, self.uri, *named, plain_tags(tags))
        try:
            self._open(self.root / folder_name(self.run_name, self.run_id[:8]))
        except BaseException:
            self._client.set_terminated(self.run_id, "FAILED")
            self.run_id = ""
            raise
        self.set_tags({tags_.FOLDER: str(self.run_folder)})
        self._send({"kind": "params", "values": mlflow_params(params)})

    @rank_zero_only
    def resume(self, run_id: str) -> bool:
        """Continue a run, with all that it has recorded; False if this server does not know it."""
        file = sqlite_file(self.uri)
        if file is not None and not file.exists():
            return False
        self._client = self._client or connect(self.uri)
        with one_line(self.uri):
            if not search(self._client, f"attributes.run_id = '{run_id}'"):
                return False
            run = self._client.get_run(run_id)
            folder = Path(run.data.tags[tags_.FOLDER])
            check_writable(folder, "the run's folder must be there to continue it")
            self.run_id, self.run_name = run_id, run.info.run_name
            self._open(folder)
            send_leftovers(self._client, absolute(self.uri), self.root)
            self._client.update_run(run_id, status="RUNNING")
            if tags_.ERROR in run.data.tags:
                self._client.delete_tag(run_id, tags_.ERROR)
            self._logged_until = last_steps(self._client, run_id)
            tables = json.loads(run.data.tags.get(LOGGED_ARTIFACTS, "[]"))
            self._tables = {table["path"] for table in tables}
            self._artifacts.bring_back(self._client, run_id)
        return True

    def find(self, run: str) -> Path:
        """The folder of a run, by its id, its name (the newest of that name) or its folder's name.

        Raises:
            UserError: there is no such run, or it is none of ours.
        """
        client = self._client or connect_to_read(self.uri, run)
        folder = find_run(client, self.uri, run).data.tags.get(tags_.FOLDER)
        if folder is None:
            raise UserError(f"run {run} was not made by qrl: it has no tag {tags_.FOLDER}")
        return Path(folder)

    @property
    def begun(self) -> bool:
        """Whether the run takes metrics, tags and artefacts."""
        return self._outbox is not None

    def _open(self, folder: Path) -> None:
        """Own the run's folder, which no other process may, and send what waits in it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._owned = own(folder)
        if self._owned is None:
            raise UserError(f"run {self.run_name} is at work in another process (in {folder})")
        self.run_folder = folder
        self._artifacts = Artifacts(folder)
        self._names = Names(self._artifacts.path(NAMES))
        self._outbox = Outbox(self._client, absolute(self.uri), self.run_id, folder)
        if self._outbox.waiting and not self._outbox.close(LEFTOVERS):
            raise UserError(f"MLflow does not take {self._outbox.waiting} yet; try again")

    def _send(self, letter: Letter) -> None:
        assert self._outbox is not None, "the run was not started"
        self._outbox.send(letter)

    @rank_zero_only
    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._send({"kind": "tags", "values": plain_tags(tags)})

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None, "every metric belongs to a step"
        now = int(time.time() * 1000)
        values = [
            [key, float(value), now, step]
            for key, value in ((self._names.key(key), value) for key, value in metrics.items())
            if key != "epoch" and step > self._logged_until.get(key, -1)
        ]
        if values:
            self._send({"kind": "metrics", "values": values})

    @rank_zero_only
    def log_text(self, text: str, artifact: str) -> None:
        """Store a text under an artefact path."""
        self._artifacts.write(artifact, text)
        self._send({"kind": "file", "path": artifact})

    @rank_zero_only
    def log_json(self, value: Any, artifact: str) -> None:
        """Store plain containers as a JSON artefact."""
        self.log_text(json.dumps(value, indent=1), artifact)

    @rank_zero_only
    def log_table(self, columns: Mapping[str, Sequence[Any]], artifact: str) -> None:
        """Add rows to a table artefact, in place of the rows of the same steps.

        Args:
            columns: by name, all of one length; one of them is ``step``.
            artifact: path of the table, ending in ``.json``.
        """
        self._artifacts.add_rows(artifact, columns)
        self._send({"kind": "file", "path": artifact})
        if artifact not in self._tables:
            self._tables.add(artifact)
            listed = [{"path": path, "type": "table"} for path in sorted(self._tables)]
            self.set_tags({LOGGED_ARTIFACTS: json.dumps(listed)})

    @rank_zero_only
    def log_entry(self, entry: Any, artifact: str) -> None:
        """Add plain containers to a JSON artefact, which is a list."""
        self._artifacts.add_entry(artifact, entry)
        self._send({"kind": "file", "path": artifact})

    @rank_zero_only
    def log_line(self, line: str, artifact: str) -> None:
        """Add a line to a log, which MLflow gets when the run ends."""
        self._artifacts.append(artifact, line)
        self._growing.add(artifact)

    @rank_zero_only
    def log_datasets(self, datasets: Sequence[Mapping[str, str]]) -> None:
        """Record what the run is trained and judged on (see `datasets.dataset`)."""
        self._send({"kind": "datasets", "values": [dict(dataset) for dataset in datasets]})

    @rank_zero_only
    def log_policy(self, folder: Path, sha256: str) -> None:
        """Record the final policy by its hash; as a model too, unless `log_models` is ``none``."""
        self.policy_sha256 = sha256
        self.set_tags({tags_.POLICY_SHA256: sha256})
        if self.log_models != "none" and self.policies is not None:
            self._send(self.policies.final(folder, sha256))

    @override
    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Record a checkpoint's policy as a model, if `log_models` asks for it."""
        if self.log_models == "checkpoints" and self.policies is not None:
            for letter in self.policies.checkpoint(self.run_folder):
                self._send(letter)

    @rank_zero_only
    def watch_system(self) -> None:
        """Log what the machine does, until the run ends."""
        if self.system_metrics_seconds:
            known = [n for key, n in self._logged_until.items() if key.startswith(PREFIX)]
            first = max(known, default=-1) + 1
            self._system = SystemMonitor(self.system_metrics_seconds, self.log_metrics, first)
            self._system.start()

    @rank_zero_only
    def finish(self, status: Status) -> None:
        """Set the final status of the run, if it was started."""
        if self._outbox is None:
            return
        if self._system is not None:
            self._system.stop()
        for artifact in sorted(self._growing):
            self._send({"kind": "file", "path": artifact})
        if self._artifacts.path(NAMES).exists():
            self._send({"kind": "file", "path": NAMES})
        self._send({"kind": "status", "status": status, "at": int(time.time() * 1000)})
        self._outbox.close()
        disown(self._owned)
        self._owned = None

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
