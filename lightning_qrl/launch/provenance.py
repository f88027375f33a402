"""What a run came from, so that it can be found, trusted and repeated: tags, datasets, memory."""

import importlib.metadata
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

import lightning_qrl
from lightning_qrl.errors import UserError
from lightning_qrl.precision.backends import find_chip
from lightning_qrl.recipe import Recipe
from lightning_qrl.tasks.base import SPLITS, Task
from lightning_qrl.tracking import git_tags, tags
from lightning_qrl.tracking.datasets import dataset

GIB = 2**30


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
        tags.DEVICE: find_chip(accelerator).name,
        tags.THREADS: str(torch.get_num_threads()),
        **git_tags(Path(lightning_qrl.__file__).parent),
    }


def datasets_of(recipe: Recipe, task: Task) -> list[dict[str, str]]:
    """The splits of a recipe's task, for MLflow."""
    arguments = dict(recipe.values.get("task", {}))
    name = str(arguments.pop("name", None) or arguments.pop("_target_"))
    described = []
    for split in SPLITS:
        pairs: Iterable[tuple[str, str]] = ((p.text, p.answer) for p in task.prompts(split))
        described.append(dataset(name, arguments, split, pairs))
    return described


def error_line(error: BaseException) -> str:
    """What a failed run ended with, in one line."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


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
