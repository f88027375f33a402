"""A tiny ablation as a process of its own, its end, and what it leaves."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient

from lightning_qrl.tracking import tags

QRL = [sys.executable, "-c", "from lightning_qrl.cli import main; main()"]
RECIPE = """\
extends: base
policy: {{name: {policy}}}
task: {{_target_: outside.Parity}}
grpo: {{prompts_per_rollout: 2, group_size: 4}}
trainer: {{max_steps: {steps}, accelerator: cpu}}
callbacks:
  held_out_evaluation: {{prompts: 8, every_n_steps: 20}}
  sampled_completions: null
  live_view: {{every_n_steps: 2}}
  checkpoint: {{every_n_epochs: 3}}
  forward_quantization: {{format: int8, outer_scale: row}}
"""
TASK = '''\
from lightning_qrl.tasks.base import Prompt


class Parity:
    """Rewards an odd sum of the completion's characters: mixed groups from any policy."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def prompts(self, split):
        return [Prompt(f"{7**i}+{i}=", "1") for i in range(7)]

    def reward(self, prompt, completion):
        if self.fails:
            raise RuntimeError("no judge today")
        return float(sum(map(ord, completion)) % 2)

    def solved(self, reward):
        return reward == 1.0
'''


@dataclass(frozen=True)
class Ablation:
    """A folder with a recipe in it, in which one command is run, again and again."""

    folder: Path
    command: tuple[str, ...]

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    def start(self) -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if "MLFLOW" not in key}
        return subprocess.Popen(
            [*QRL, "ablate", *self.command],
            cwd=self.folder,
            env={**environment, "MLFLOW_TRACKING_URI": self.uri},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        """Run it to its end: exit code and what it said."""
        process = self.start()
        said, _ = process.communicate()
        return process.returncode, said

    def runs(self) -> list:
        """All runs but the parents."""
        return [run for run in self._all() if tags.ARM in run.data.tags]

    def parents(self) -> list:
        return [run for run in self._all() if tags.DESIGN in run.data.tags]

    def counting(self) -> dict[tuple[str, int], object]:
        """The run that counts of each arm and seed; there is one."""
        by_key: dict[tuple[str, int], object] = {}
        for run in self.runs():
            if tags.REPLACED_BY not in run.data.tags:
                key = run.data.tags[tags.ARM], int(run.data.tags[tags.SEED])
                assert key not in by_key, f"two runs of {key}"
                by_key[key] = run
        return by_key

    def weights(self) -> dict[tuple[str, int], bytes]:
        """The weights that each run ended with."""
        folders = {key: Path(run.data.tags[tags.FOLDER]) for key, run in self.counting().items()}
        return {
            key: (folder / "policy" / "model.safetensors").read_bytes()
            for key, folder in folders.items()
        }

    def _all(self) -> list:
        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("lightning_qrl")
        return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def make_ablation(folder: Path, policy: str, *options: str, steps: int) -> Ablation:
    folder.mkdir()
    (folder / "outside.py").write_text(TASK)
    (folder / "tiny.yaml").write_text(RECIPE.format(policy=policy, steps=steps))
    return Ablation(folder, ("--recipe", "tiny.yaml", *options))


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, while it lives."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
