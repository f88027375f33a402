"""What this machine has for a run, what it lacks, and whether our GRPO is sound on it."""

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from lightning_qrl.errors import UserError
from lightning_qrl.formats import format_names, get_format
from lightning_qrl.formats.compiling import ENOUGH, compiled
from lightning_qrl.launch.process import quiet
from lightning_qrl.precision import LinearPrecision
from lightning_qrl.precision.backends import Chip, choose, find_chip
from lightning_qrl.precision.backends.emulate import Emulate
from lightning_qrl.probes import PROBES, Verdict, run_probe
from lightning_qrl.reports.doctor import Finding
from lightning_qrl.tracking import MLflowRun
from lightning_qrl.tracking.client import connect
from lightning_qrl.tracking.reach import PORTS, check_answers, check_writable, shown

GIB = 2**30
LITTLE_DISK = 1 * GIB
CPU_BF16 = {  # what torch calls them: what people do
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX-BF16",
    "bf16": "Arm BF16",
    "sve_bf16": "SVE-BF16",
}
LAYER = (128, 128)  # a weight of a shape that suits every kernel
PACKAGES = ("lightning-qrl", "torch", "lightning", "transformers", "torchao", "mlflow")
EXTRAS = {"transformer-engine": "te", "vllm": "vllm"}


def examine() -> Iterator[Finding]:
    """Look at the machine; nothing is written."""
    chip = find_chip()
    yield _cores()
    yield _memory()
    yield _accelerator(chip)
    yield _bf16(chip)
    yield from _formats(chip)
    yield _compiler("cuda" if torch.cuda.is_available() else "cpu")
    record = MLflowRun()
    yield _disk(record.root)
    yield _mlflow(record.uri)
    yield from _versions()


def probe() -> Iterator[Verdict]:
    """Run the probes, from the one that needs least of GRPO to the one that needs most."""
    for one in PROBES:
        with quiet():
            verdict = run_probe(one)
        yield verdict


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    many = threads > (cores or threads)
    remedy = f"more threads than cores wait for one another: set OMP_NUM_THREADS={cores}"
    return Finding("cores", f"{cores}, {threads} threads", remedy if many else "")


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not on Windows
        return Finding("memory", "unknown")
    return Finding("memory", _gib(total))


def _accelerator(chip: Chip) -> Finding:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        parts = [chip.name, f"{_gib(free)} of {_gib(total)} free"]
        if chip.capability is not None:
            parts.insert(1, "compute capability {}.{}".format(*chip.capability))
        return Finding("accelerator", ", ".join(parts))
    remedy = ""
    if shutil.which("nvidia-smi"):
        remedy = "nvidia-smi is there, but torch finds no GPU: "
        remedy += "check the driver" if torch.version.cuda else "install a torch built for CUDA"
    return Finding("accelerator", f"none; {chip.name} computes", remedy)


def _bf16(chip: Chip) -> Finding:
    if torch.cuda.is_available():
        units = [chip.name] if torch.cuda.is_bf16_supported(including_emulation=False) else []
    else:
        has = torch.cpu.get_capabilities()
        units = [name for key, name in CPU_BF16.items() if has.get(key)]
    remedy = "" if units else "BF16 saves no time here: leave trainer.precision at 32-true"
    return Finding("BF16 units", ", ".join(units) or "none", remedy)


def _formats(chip: Chip) -> Iterator[Finding]:
    """By what computes a layer in them and why, asked of the backends themselves."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in format_names():
        format = get_format(name)
        if format.bits < 16:
            asked = LinearPrecision(weight=format, activation=format)
            choice = choose("auto", asked, LAYER, chip)
            found.setdefault((choice.backend, choice.why.replace(name, "it")), []).append(name)
    for (backend, why), names in found.items():
        how = "emulated" if backend == Emulate.name else f"native: {backend}"
        yield Finding(how, f"{' '.join(names)} ({why})")


def _compiler(device: str) -> Finding:
    """Whether a kernel can be compiled, runs, and gives the bits of the plain function."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return Finding(
            "compiler", "off", "unset TORCH_COMPILE_DISABLE: emulation is faster with it"
        )
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _scaled("doctor", torch.linspace(-1, 1, ENOUGH, device=device))
    trouble = [str(warning.message) for warning in said if warning.category is UserWarning]
    if trouble:
        needed = "a C++ compiler" if device == "cpu" else "a C++ compiler and Triton"
        return Finding("compiler", trouble[0], f"install {needed}; emulation is faster with it")
    seconds = time.perf_counter() - began
    return Finding("compiler", f"a compiled kernel runs and gives the right bits ({seconds:.0f} s)")


@compiled()
def _scaled(name: str, x: Tensor) -> Tensor:
    return x * 3 + 1


def _disk(folder: Path) -> Finding:
    try:
        check_writable(folder, "run from another folder, or set tracking.folder")
    except UserError as error:
        return Finding("disk", str(error), broken=True)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    remedy = "checkpoints fill this soon: set tracking.folder" if free < LITTLE_DISK else ""
    return Finding("disk", f"{_gib(free)} free for {folder}", remedy)


def _mlflow(uri: str) -> Finding:
    """Whether runs can be recorded. No database is touched: opening one makes its tables."""
    database = uri.partition(":")[0].partition("+")[0] in ("sqlite", *PORTS)
    try:
        (check_answers if database else connect)(uri)
    except UserError as error:
        return Finding("MLflow", str(error), broken=True)
    return Finding("MLflow", f"{shown(uri)} can be reached")


def _versions() -> Iterator[Finding]:
    there = {name: _version(name) for name in (*PACKAGES, *EXTRAS)}
    yield Finding("versions", ", ".join(f"{name} {v}" for name, v in there.items() if v))
    missing = [name for name in EXTRAS if there[name] is None]
    if missing:
        extras = ",".join(EXTRAS[name] for name in missing)
        how = f"pip install 'lightning-qrl[{extras}]'"
        yield Finding("not installed", f"{', '.join(missing)} ({how})")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
