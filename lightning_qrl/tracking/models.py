"""Policies as MLflow's logged models, which `transformers` loads back.

    folder = mlflow.artifacts.download_artifacts("models:/<id>")
    AutoModelForCausalLM.from_pretrained(folder)

A model is linked to its run at its step, and the held-out metrics of that step are linked to it.
MLflow keeps a copy of the weights, so that a run may be moved or its folder deleted: a run whose
policy has N bytes takes 2 N with ``tracking.log_models: final``, N with ``none``, and N more for
each checkpoint with ``checkpoints``. Where MLflow stores to a disk here that has too little room,
the copy is left out, and that is said.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lightning_qrl.tracking.reach import patient
from lightning_qrl.tracking.refusals import Refused
from lightning_qrl.tracking.tags import POLICY_SHA256

KEY = "qrl.model_key"  # by which a model that may be there already is looked for
MARGIN = 1.1  # of the room that a copy needs


@dataclass(frozen=True)
class Policies:
    """The policies of one run, to be recorded.

    Attributes:
        name: of the final policy's model.
        tags: of each model.
        save: writes the policy as it is to a folder that `transformers` loads.
        step: the number of optimizer steps behind it.
    """

    name: str
    tags: Mapping[str, str]
    save: Callable[[Path], None]
    step: Callable[[], int]
    _steps: set[int] = field(default_factory=set)

    def final(self, folder: Path, sha256: str) -> dict[str, Any]:
        """The letter for the final policy, in a folder within the run's, by its weights' hash."""
        letter = self._letter(folder.name, self.name, temporary=False)
        letter["tags"][POLICY_SHA256] = sha256
        return letter

    def checkpoint(self, run_folder: Path) -> list[dict[str, Any]]:
        """Write the policy that a checkpoint was saved of; its letter, or none if it was sent."""
        step = self.step()
        if step in self._steps:
            return []
        self._steps.add(step)
        folder = f"policy-step-{step}"
        self.save(run_folder / folder)
        return [self._letter(folder, f"{self.name}-step-{step}", temporary=True)]

    def _letter(self, folder: str, name: str, *, temporary: bool) -> dict[str, Any]:
        named = {"kind": "model", "folder": folder, "name": name, "step": self.step()}
        return {**named, "tags": dict(self.tags), "temporary": temporary}


def deliver_model(client: Any, run_id: str, folder: Path, letter: dict[str, Any]) -> None:
    """Make a model of a folder of weights, or complete the one that was begun.

    Raises:
        Refused: the folder is gone, or there is no room for a copy.
    """
    weights = folder / letter["folder"]
    if not weights.is_dir():
        raise Refused(f"{weights} is gone")
    run, step = client.get_run(run_id), letter["step"]
    model = _find_or_make(client, run, letter)
    if model.status != "READY":
        _check_room(model.artifact_location, weights)
        with patient():
            client.log_model_artifacts(model.model_id, str(weights))
        client.finalize_logged_model(model.model_id, "READY")
    outputs = run.outputs.model_outputs if run.outputs else []
    if model.model_id not in [output.model_id for output in outputs]:
        from mlflow.entities import LoggedModelOutput

        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    _link_evaluations(client, run, model.model_id, step)
    if letter["temporary"]:
        shutil.rmtree(weights)


def _find_or_make(client: Any, run: Any, letter: dict[str, Any]) -> Any:
    experiment, run_id = run.info.experiment_id, run.info.run_id
    name = re.sub(r"[/:.%\"']", "_", letter["name"])
    key = f"{run_id}/{letter['folder']}/{letter['step']}"
    for model in client.search_logged_models([experiment], f"tags.`{KEY}` = '{key}'"):
        return model
    tags = {**letter["tags"], KEY: key}
    return client.create_logged_model(
        experiment, name, run_id, tags, {"step": str(letter["step"])}, "causal-lm"
    )


def _check_room(location: str, weights: Path) -> None:
    place = urlsplit(location)
    if place.scheme not in ("", "file"):
        return
    size = sum(file.stat().st_size for file in weights.rglob("*") if file.is_file())
    path = Path(unquote(place.path))
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < MARGIN * size:
        raise Refused(
            f"no room for a copy of {weights}: {size / 1e9:.2f} GB, free {free / 1e9:.2f} GB"
        )


def _link_evaluations(client: Any, run: Any, model_id: str, step: int) -> None:
    """The run's held-out metrics of a step are the model's too; their timestamps are kept."""
    from mlflow.entities import Metric

    linked = []
    for key in run.data.metrics:
        if key.startswith("eval/"):
            for m in client.get_metric_history(run.info.run_id, key):
                if m.step == step:
                    linked.append(Metric(key, m.value, m.timestamp, step, model_id=model_id))
    if linked:
        client.log_batch(run.info.run_id, metrics=linked)
