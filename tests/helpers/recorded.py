"""MLflow runs without training: written straight into a sqlite store, and made up on the spot.

`Store` fills the tables that MLflow made, because its client takes minutes for the histories of a
large experiment. `learning` makes up histories that look like a run's.
"""

import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlflow import MlflowClient
from mlflow.entities import RunTag

from lightning_qrl.tracking.notebook import History, RecordedRun

LARGEST = 1.7976931348623157e308  # what MLflow stores for infinity
METRICS = (  # those that a comparison reads, and some
    "train/reward",
    "train/reward_std",
    "train/loss",
    "train/entropy",
    "train/grad_norm",
    "train/kl",
    "train/tokens_per_second",
    "train/step_time",
    "train/completions/mean_length",
    "train/sampling/sampling_logp_difference/mean",
    "rollout_corr/ess_token",
    "rollout_corr/k3_kl",
    "rollout_corr/extreme_fraction",
    "perf/max_memory_rss_gb",
    "eval/reward",
)


class Store:
    """A sqlite store in a folder.

    Args:
        folder: holds the file and the artefacts.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "mlflow.db"
        self.uri = f"sqlite:///{self.file}"
        self.client = MlflowClient(self.uri)

    def add(
        self,
        name: str,
        metrics: Mapping[str, History],
        *,
        experiment: str = "lightning_qrl",
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        status: str = "FINISHED",
        texts: Mapping[str, str] | None = None,
    ) -> str:
        """A run; its id."""
        found = self.client.get_experiment_by_name(experiment)
        if found is None:
            where = (self.file.parent / "artifacts" / experiment).as_uri()
            identity = self.client.create_experiment(experiment, artifact_location=where)
        else:
            identity = found.experiment_id
        run = self.client.create_run(identity, run_name=name, tags=dict(tags or {})).info.run_id
        for key, value in (params or {}).items():
            self.client.log_param(run, key, value)
        self._write(run, metrics)
        for artifact, text in (texts or {}).items():
            self.client.log_text(run, text, artifact)
        if status != "RUNNING":
            self.client.set_terminated(run, status)
        return run

    def tag(self, run: str, **tags: str) -> None:
        """Add tags; two underscores in a name stand for a dot."""
        entries = [RunTag(key.replace("__", "."), value) for key, value in tags.items()]
        self.client.log_batch(run, tags=entries)

    def _write(self, run: str, metrics: Mapping[str, History]) -> None:
        with sqlite3.connect(self.file) as database:
            for key, (steps, values) in metrics.items():
                rows = [
                    (key, _stored(y), 1_000_000 + 10 * i, run, int(step), math.isnan(y))
                    for i, (step, y) in enumerate(zip(steps, values.tolist(), strict=True))
                ]
                database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
                last = max(rows, key=lambda row: row[4])
                key, value, time, run, step, nan = last
                latest = (key, value, time, step, nan, run)
                database.execute("INSERT INTO latest_metrics VALUES (?, ?, ?, ?, ?, ?)", latest)
        database.close()


def _stored(value: float) -> float:
    if math.isnan(value):
        return 0.0
    return math.copysign(LARGEST, value) if math.isinf(value) else value


def learning(
    seed: int, steps: int = 80, *, shift: float = 0.0, noise: float = 0.01, every: int = 10
) -> dict[str, History]:
    """Histories that look like a run's: of `METRICS`.

    Args:
        seed: of all that is random.
        steps: how many; training metrics are logged at 1 to this one.
        shift: added to the reward that it ends at.
        noise: standard deviation, over seeds, of the reward that it ends at.
        every: steps between evaluations, of which the first is at 0.
    """
    rng = np.random.default_rng(seed)
    at_S = np.arange(1, steps + 1)
    end = 0.9 + shift + noise * rng.standard_normal()
    curve = 0.3 + (end - 0.3) * (1 - np.exp(-5 * at_S / steps))
    made = {}
    for key in METRICS:
        values = np.exp(0.2 * rng.standard_normal(steps))
        made[key] = History(at_S, values)
    made["train/reward"] = History(at_S, curve + 0.03 * rng.standard_normal(steps))
    made["train/entropy"] = History(at_S, 0.5 * np.exp(-at_S / steps) * made["train/loss"].values)
    made["rollout_corr/ess_token"] = History(at_S, 1 / (1 + 0.05 * made["train/kl"].values))
    mismatch = 0.02 * made["train/kl"].values
    made["train/sampling/sampling_logp_difference/mean"] = History(at_S, mismatch)
    evaluated = np.append(0, at_S[every - 1 :: every])
    rewards = np.append(0.3, curve)[evaluated] + 0.005 * rng.standard_normal(evaluated.size)
    made["eval/reward"] = History(evaluated, rewards)
    return made


def recorded(
    name: str,
    metrics: Mapping[str, History],
    *,
    seed: int | None = None,
    arm: str = "",
    recipe_hash: str = "",
    **given: Any,
) -> RecordedRun:
    """A run as it would be read back, without any store."""
    tags = dict(given.pop("tags", {}))
    if seed is not None:
        tags["qrl.seed"] = str(seed)
    if arm:
        tags["qrl.arm"] = arm
    if recipe_hash:
        tags["qrl.recipe_hash"] = recipe_hash
    plain = {
        "id": name,
        "name": name,
        "experiment": "tests",
        "status": "FINISHED",
        "tags": tags,
        "params": {},
        "started": 0.0,
        "ended": 1.0,
    }
    return RecordedRun(**{**plain, **given}, metrics=dict(metrics))


def large_experiment(store: Store, arms: int = 10, seeds: int = 5, steps: int = 500) -> str:
    """An ablation of `arms` times `seeds` runs with all of `METRICS`; the parent's id."""
    parent = store.add(
        "ablate-4bitter", {}, experiment="large", tags={"qrl.kind": "ablation"}, status="FINISHED"
    )
    for arm in range(arms):
        name = f"without callback_{arm}" if arm else "full"
        for seed in range(seeds):
            tags = {
                "mlflow.parentRunId": parent,
                "qrl.parent": parent,
                "qrl.arm": name,
                "qrl.removed": name.removeprefix("without ") if arm else "",
                "qrl.recipe": "4bitter",
                "qrl.recipe_hash": f"{arm:08x}",
                "qrl.seed": str(seed),
            }
            metrics = learning(100 * arm + seed, steps, shift=-0.02 * arm)
            texts = {
                "recipe.yaml": f"seed: {seed}\ncallbacks:\n  arm: {arm}\n",
                "plan.txt": "plan\n",
            }
            store.add(f"{name}-seed{seed}", metrics, experiment="large", tags=tags, texts=texts)
    return parent
