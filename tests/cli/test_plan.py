"""`qrl plan`: the table, in words that a pipe can take."""

from typer.testing import CliRunner

from lightning_qrl.cli import app


def planned(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["plan", "--recipe", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


def test_a_line_for_each_layer_and_a_summary():
    lines = planned("4bitter.yaml")
    assert len(lines) == 1 + 57 + 1
    assert lines[-1].endswith("; · computes in trainer.precision (32-true)")


def test_overrides_and_several_withouts_change_it():
    whole = planned("4bitter")
    part = planned("4bitter", "--without", "bf16_tail", "--without", "sensitive_weights")
    assert not any("bf16_tail" in line or "sensitive_weights" in line for line in part)
    assert any("bf16_tail" in line for line in whole)
    wider = planned("4bitter", "callbacks.bf16_tail.fraction=0.5")
    count = [sum("bf16_tail" in line for line in lines[:-1]) for lines in (whole, wider)]
    assert count[1] == 4 * count[0]
