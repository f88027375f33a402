"""`qrl fit`: what a person at the terminal sees."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.recipe import load_recipe

QRL = [sys.executable, "-c", "from lightning_qrl.cli import main; main()"]
SMALL = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=3",
    "grpo.prompts_per_rollout=2",
    "grpo.group_size=4",
    "callbacks.held_out_evaluation.prompts=8",
    "callbacks.live_view.every_n_steps=1",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_a_dry_run_prints_a_recipe_that_is_the_same_again(here):
    without = ["--without", "bf16_tail", "--without", "live_view"]
    overrides = [
        "callbacks.checkpoint=null",
        "optimizer.betas=[0.8,0.9]",
        "callbacks.sensitive_weights.select=[mlp]",
    ]
    done = CliRunner().invoke(app, ["fit", "-r", "4bitter", "--dry-run", *without, *overrides])
    assert done.exit_code == 0
    assert list(here.iterdir()) == []
    (here / "again.yaml").write_text(done.stdout)
    again = load_recipe("again").values
    assert again == load_recipe("4bitter", overrides, ["bf16_tail", "live_view"]).values
    assert again["callbacks"].keys().isdisjoint({"bf16_tail", "live_view", "checkpoint"})
    assert again["optimizer"]["betas"] == [0.8, 0.9]


def test_only_our_lines_are_seen_and_a_run_can_go_on(here):
    """One process of its own, as a person starts it: imports are part of what is seen."""
    command = [
        *QRL,
        "fit",
        "--recipe",
        "4bitter.yaml",
        *SMALL,
        "callbacks.checkpoint.every_n_epochs=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 10
    plan = lines.pop(0)
    assert re.fullmatch(r"nvfp4 forward on \d+ of 57 linears, .*", plan)
    pattern = (
        r"step {n}/3  reward \d\.\d{{3}}  entropy \S+  grad norm \S+  \|Δlogprob\| \S+  "
        r"loss \S+  tokens/s \S+  \S+ left"
    )
    for number, line in enumerate(lines[:3], 1):
        assert re.fullmatch(pattern.format(n=number), line), line
    assert lines[4] == f"finished: {plan}"
    assert re.fullmatch(r"held-out reward  0\.\d+ at step 0  ->  0\.\d+ at step 3", lines[5])
    assert re.fullmatch(r"run     4bitter-seed0 \(id [0-9a-f]{32}\)", lines[6])
    folder = Path(lines[7].removeprefix("folder  "))
    assert folder.parent == here / "runs"
    assert (folder / "policy" / "model.safetensors").is_file()
    assert lines[8] == "look    mlflow ui --backend-store-uri sqlite:///mlflow.db"
    assert (here / "mlflow.db").is_file()
    arguments = ["fit", "--resume", folder.name, "trainer.max_steps=4"]
    planned = CliRunner().invoke(app, [*arguments, "--dry-run"], catch_exceptions=False)
    assert "max_steps: 4" in planned.stdout
    more = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert more.exit_code == 0
    assert "step 4/4" in more.stdout
    assert str(folder) in more.stdout


def test_a_terminal_gets_a_panel(here):
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    command = [*QRL, "fit", "--recipe", "4bitter.yaml", *SMALL]
    process = subprocess.Popen(command, stdout=side, stderr=side, stdin=side, env=environment)
    os.close(side)
    seen = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(main)
    assert process.wait() == 0, seen.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert "╭─" in text
    assert "4bitter-seed0" in text
    assert "step 3/3" in text
    assert re.search(r"reward 0\.\d{3} [▁▂▃▄▅▆▇█]+", text)
    assert "finished: nvfp4 forward on" in text
    assert "Loading" not in text
    assert "Writing" not in text
