"""What a run came from, so that it can be found, trusted and repeated: tags, datasets, memory."""

import importlib.metadata
import inspect
import json
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache

import lightning_qrl
from lightning_qrl.build import Run
from lightning_qrl.precision.backends import find_chip
from lightning_qrl.precision.backends.base import CPU
from lightning_qrl.recipe import Recipe
from lightning_qrl.tasks.base import SPLITS, Task
from lightning_qrl.tracking import git_tags, tags
from lightning_qrl.tracking.datasets import dataset

GIB = 2**30
SESSIONS = "sessions.json"  # artefact: where and when a run was begun, and each time it went on
OURS = (
    "lightning_qrl",
    "callbacks",
    "lightning",
    "pytorch_lightning",
)  # told by commit and version
DIGEST = 16  # hex digits


def recipe_tags(recipe: Recipe) -> dict[str, str]:
    """Which recipe, and which seed."""
    return {
        tags.RECIPE: recipe.name,
        tags.RECIPE_HASH: recipe.hash(),
        tags.SEED: str(recipe.values.get("seed", 0)),
    }


def environment_tags(recipe: Recipe) -> dict[str, str]:
    """The code, the packages and the machine: what a repeated run should have alike."""
    accelerator = str(recipe.values.get("trainer", {}).get("accelerator", "auto"))
    versions = {tag: importlib.metadata.version(name) for tag, name in tags.PACKAGES.items()}
    return {
        tags.VERSION: lightning_qrl.__version__,
        tags.PYTHON: platform.python_version(),
        **versions,
        tags.DEVICE: _chip_name(accelerator),
        tags.THREADS: str(torch.get_num_threads()),
        **git_tags(Path(lightning_qrl.__file__).parent),
    }


def _chip_name(accelerator: str) -> str:
    chip = find_chip(accelerator)
    return _cpu_name() if chip == CPU else chip.name


def _cpu_name() -> str:
    """The model of this machine's CPU: how it rounds sums is its own."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def source_tags(run: Run) -> dict[str, str]:
    """Digests of what a run is made of besides our code and packages.

    Of a task or callback of somebody else's it is that of the file with its class (not of what that
    imports), of a policy's folder that of its files, and of a policy from a hub its commit there.
    """
    named: dict[str, object] = {"task": run.module.task}
    named |= {f"callbacks.{key}": callback for key, callback in run.callbacks.items()}
    digests = {key: _source_digest(type(part)) for key, part in named.items()}
    digests["policy"] = _policy_digest(run.module.policy.name)
    return {tags.SOURCES: json.dumps({key: value for key, value in digests.items() if value})}


def _source_digest(kind: type) -> str:
    if kind.__module__.partition(".")[0] in OURS:
        return ""
    try:
        return _digest([Path(inspect.getfile(kind))])
    except (TypeError, OSError):  # it was made without a file
        return "no file"


def _policy_digest(name: str) -> str:
    place = Path(name).expanduser()
    if place.is_file():
        return _digest([place])
    if place.is_dir():
        return _digest(sorted(file for file in place.iterdir() if file.is_file()))
    if "/" not in name:  # ours
        return ""
    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent.name if isinstance(config, str) else ""


def _digest(files: Iterable[Path]) -> str:
    digest = sha256()
    for file in files:
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        with file.open("rb") as opened:
            while part := opened.read(2**20):
                digest.update(part)
    return digest.hexdigest()[:DIGEST]


def session(recipe: Recipe, environment: dict[str, str], step: int) -> dict[str, str | int]:
    """What is recorded each time a run is begun or gone on with, at a step."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"began": now, "step": step, tags.RECIPE_HASH: recipe.hash(), **environment}


def datasets_of(recipe: Recipe, task: Task) -> list[dict[str, str]]:
    """The splits of a recipe's task, for MLflow."""
    arguments = dict(recipe.values.get("task", {}))
    name = str(arguments.pop("name", None) or arguments.pop("_target_"))
    described = []
    for split in SPLITS:
        pairs: Iterable[tuple[str, str]] = ((p.text, p.answer) for p in task.prompts(split))
        described.append(dataset(name, arguments, split, pairs))
    return described


def peak_memory() -> dict[str, float]:
    """Most memory that this process has had at one time, in GiB, of the host and of a CUDA device.

    The host's is Linux's ``VmHWM``: what ``getrusage`` gives, elsewhere, is at least what the
    process had that started this one.
    """
    peaks = {"perf/max_memory_rss_gb": _peak_rss() / GIB}
    if torch.cuda.is_available():
        peaks["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / GIB
    return peaks


def _peak_rss() -> int:
    """In bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
