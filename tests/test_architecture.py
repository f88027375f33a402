"""The house: who imports whom, how large a room may grow, and what importing must not do."""

import ast
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lightning_qrl", "callbacks")
MAX_FILE_LINES = 300
MAX_CALLBACK_LINES = 120
MAX_FUNCTION_LINES = 60


def sources() -> list[Path]:
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    assert files
    return files


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def imported_roots(file: Path) -> set[str]:
    """Names of the top-level packages that a file imports, anywhere in it."""
    roots = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """Each function's place and its length in lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            place = f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
            yield place, node.end_lineno - node.lineno + 1


def test_the_import_contracts_hold():
    lint_imports = Path(sysconfig.get_path("scripts"), "lint-imports")
    done = run(str(lint_imports), "--no-logo", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("library", ["ray", "torchao", "transformer_engine", "vllm"])
def test_one_file_wraps_each_optional_library(library):
    wrappers = [str(f.relative_to(ROOT)) for f in sources() if library in imported_roots(f)]
    assert len(wrappers) <= 1, f"{library} is imported by {wrappers}"


def test_files_stay_short():
    limits = {"lightning_qrl": MAX_FILE_LINES, "callbacks": MAX_CALLBACK_LINES}
    lines = {f.relative_to(ROOT): len(f.read_text().splitlines()) for f in sources()}
    long = {str(name): count for name, count in lines.items() if count > limits[name.parts[0]]}
    assert not long


def test_functions_stay_short():
    every = [function for file in sources() for function in functions(file)]
    assert not [(place, length) for place, length in every if length > MAX_FUNCTION_LINES]


def test_the_command_line_starts_without_torch():
    code = "import sys, lightning_qrl.cli; sys.exit('torch' in sys.modules)"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr or "importing lightning_qrl.cli imports torch"


# Every module, not the two roots alone. `_lazy_init` is the one door through which torch starts
# CUDA; with it barred, a machine without a GPU sees an import that would open it.
IMPORT_ALL = """
import importlib, pkgutil, torch

def barred():
    raise AssertionError("this import initialises CUDA")

torch.cuda._lazy_init = barred
for root in ("lightning_qrl", "callbacks"):
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, f"{root}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
assert not torch.cuda.is_initialized()
"""


def test_importing_touches_no_cuda():
    done = run(sys.executable, "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
