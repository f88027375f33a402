"""Help is there, has examples, and comes without waiting for anything heavy."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lightning_qrl.cli import app

COMMANDS = [
    ["fit"], ["plan"], ["recipes", "ls"], ["recipes", "show"], ["recipes", "cp"],
    ["recipes", "validate"], ["recipes", "diff"], ["inspect"], ["sensitivity"],
    ["doctor"], ["ablate"], ["compare"], ["simulate"],
]  # fmt: skip
HEAVY = ("torch", "lightning", "mlflow", "transformers", "omegaconf", "yaml", "numpy", "pydantic")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command):
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert f"Example: qrl {' '.join(command)}" in done.output


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_command_lists_its_commands(arguments):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == (0 if arguments else 2)
    assert "Example: qrl fit --recipe 4bitter.yaml" in done.output
    for command in COMMANDS:
        assert command[0] in done.output


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom lightning_qrl.cli import main\nsys.argv = ['qrl', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    assert done.stderr.strip() == "[]"
