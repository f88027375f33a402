"""A job: one arm with one seed, and the files of it in the ablation's folder.

03-without_bf16_tail-seed1.yaml     the recipe, as `qrl fit` takes it
                          .json     the rest of what the child's process is told
                          .lock     held by that process
                          .log      what it says
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_qrl.ablation.design import Arm, Design
from lightning_qrl.tracking import tags
from lightning_qrl.tracking.family import Family

LONGEST = 80  # characters of an arm's name in a file's; its number tells arms apart
SAYS = "qrl: "  # how a line begins that a run ends with when it fails


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a design.

    Attributes:
        arm: name of its arm.
        seed: its seed.
        steps: optimizer steps of it.
        stem: path of its files, without their suffix.
        tags: of its run in MLflow.
        uri: tracking server; it may hold a password, so it is in no file.
    """

    arm: str
    seed: int
    steps: int
    stem: Path
    tags: dict[str, str]
    uri: str

    @property
    def key(self) -> tuple[str, int]:
        """Arm and seed."""
        return self.arm, self.seed

    @property
    def run_name(self) -> str:
        """The name of its run in MLflow."""
        return f"{self.arm}-seed{self.seed}"

    def file(self, suffix: str) -> Path:
        """One of its files."""
        return self.stem.with_name(f"{self.stem.name}.{suffix}")

    def command(self) -> list[str]:
        """What starts its process."""
        module = "lightning_qrl.ablation.child"
        return [sys.executable, "-u", "-m", module, str(self.file("json"))]

    def environment(self) -> dict[str, str]:
        """Variables that its process is told further things by."""
        return {"MLFLOW_TRACKING_URI": self.uri}

    def step(self) -> int:
        """The newest optimizer step that the log tells of; 0 where it tells of none."""
        found = re.findall(r"^step (\d+)/", self._log(), re.MULTILINE)
        return int(found[-1]) if found else 0

    def last_words(self, since: int) -> str:
        """The last error in the log, of what was written after so many bytes; empty if none."""
        lines = [line for line in self._log(since).splitlines() if line.startswith(SAYS)]
        return lines[-1].removeprefix(SAYS) if lines else ""

    def log_size(self) -> int:
        """Bytes in the log."""
        log = self.file("log")
        return log.stat().st_size if log.exists() else 0

    def _log(self, since: int = 0) -> str:
        log = self.file("log")
        if not log.exists():
            return ""
        return log.read_bytes()[since:].decode(errors="replace")


def write_jobs(design: Design, family: Family, folder: Path) -> list[Job]:
    """The jobs of a design, seed by seed, with the files that their processes read.

    So the first results are of all arms with one seed.
    """
    jobs = []
    for seed in design.seeds:
        for number, arm in enumerate(design.arms):
            values: Any = OmegaConf.to_container(OmegaConf.create(arm.recipe))
            name = re.sub(r"[^\w.=-]+", "_", arm.name)[:LONGEST]
            stem = folder / f"{number:02}-{name}-seed{seed}"
            own = _tags(design, arm, seed, family.parent)
            job = Job(arm.name, seed, values["trainer"]["max_steps"], stem, own, family.uri)
            tracking = values.get("tracking", {})
            place = {"experiment": family.experiment, "run_name": job.run_name}
            root = {"folder": str(folder.parent)}  # whatever folder the command is started in
            values |= {"seed": seed, "tracking": {**tracking, **place, **root}}
            told = {"recipe": design.recipe, "tags": own, **place, "parent": family.parent}
            job.file("yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)), "utf-8")
            job.file("json").write_text(json.dumps(told, indent=1), "utf-8")
            jobs.append(job)
    return jobs


def _tags(design: Design, arm: Arm, seed: int, parent: str) -> dict[str, str]:
    return {
        tags.MLFLOW_PARENT: parent,
        tags.PARENT: parent,
        tags.RECIPE: design.recipe,
        tags.RECIPE_HASH: arm.recipe_hash,
        tags.ARM: arm.name,
        tags.REMOVED: ",".join(arm.removed),
        tags.SEED: str(seed),
    }
