"""`qrl simulate`: what it prints and writes, and that it is what the model says."""

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.cli.simulating.base import KEYS
from lightning_qrl.cli.simulating.options import PAGE, PRESETS, SETTINGS, with_page_file
from lightning_qrl.simulator import settings as simulator_settings
from lightning_qrl.simulator.page import write_page
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import summarize

NAIVE = simulator_settings.PRESETS["fp4_naive"]
FULL = simulator_settings.PRESETS["fp4_full"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def read(*arguments: str):
    return json.loads(printed(*arguments, "--format", "json"))


def as_json(value):
    return json.loads(json.dumps(value))


def test_a_run_with_its_timeline_and_outcome():
    lines = printed("--preset", "fp4_naive", "max_staleness=4").splitlines()
    assert [line.split("  ")[0].strip() for line in lines[:7]] == [
        "time", "trainer", "weights", "sampler 0", "sampler 1", "sampler 2", "sampler 3",
    ]  # fmt: skip
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    # these are the post's numbers: 35 steps, reward .076, drift 5.70, diverged at 15
    assert "steps 35 in 66 units of time; DIVERGED at step 15 (counted from 0)" in text
    assert "reward 0.450 -> 0.076" in text
    assert "drift 5.70 after 3 kicks, diverged above 2.2; no fixed point" in text
    assert "of the critical 0.0304" in text
    assert "quantization 0.0543" in text


def test_the_fixed_point_where_there_is_one():
    text = " ".join(printed("precision=bf16").split())
    trace = simulate(Settings(precision="bf16"))
    mean = sum(step.effective for step in trace.steps) / len(trace.steps)
    low = (0.12 - (0.12**2 - 4 * 6 * 0.65 * mean**2) ** 0.5) / (2 * 0.65 * mean)
    assert f"fixed point {low:.2f} at the mean effective mismatch, {mean:.4f} of the" in text


def test_json_is_what_the_model_says():
    made = read("--preset", "fp4_full", "weight_sync=true", "max_staleness=1", "seed=3")
    settings = Settings(**{**FULL, "weight_sync": True, "max_staleness": 1, "seed": 3})
    trace = simulate(settings)
    assert made["settings"] == asdict(settings)
    for name in ("rollouts", "steps", "broadcasts"):
        assert made[f"all_{name}"] == as_json([asdict(part) for part in getattr(trace, name)])
    for name in ("final_reward", "final_drift", "mean_staleness", "discarded", "duration"):
        assert made[name] == getattr(trace, name)
    assert made["optimizer_steps"] == len(trace.steps)
    assert made["rollouts"] == sum(made[fate] for fate in FATES) == len(trace.rollouts)
    assert sum(made["staleness"].values()) == made["consumed"]


FATES = ("consumed", "discarded", "queued", "running")


def test_settings_are_laid_over_one_another():
    assert read("--preset", "fp4_full", "batch=8")["settings"] == asdict(Settings(**FULL, batch=8))
    over = read("--preset", "fp4_full", "precision=fp8")["settings"]
    assert over == asdict(Settings(**{**FULL, "precision": "fp8"}))


def test_settings_that_do_nothing_are_said():
    text = printed("precision=bf16", "four_over_six=true")
    text = " ".join(text.split())
    assert "note four_over_six=true has no effect with precision=bf16: " in text
    assert "note" not in printed("precision=fp4", "four_over_six=true")
    axes = ["--sweep", "four_over_six=true,false"]
    (note,) = read(*axes)["notes"]
    assert note.startswith("four_over_six has no effect with precision=fp8: ")
    assert "note        four_over_six has no effect" in printed(*axes)
    assert read(*axes, "--sweep", "precision=fp4,fp8")["notes"] == [note]
    assert read(*axes, "--seeds", "2")["notes"] == [note]
    both = read("--compare", "fp8_dq", "fp4_dq", "four_over_six=true")
    assert "four_over_six=true has no effect" in both["A"]["notes"][0]
    assert both["B"]["notes"] == []


def test_a_run_without_a_step_says_why():
    text = " ".join(printed("batch=1024", "samplers=1").split())
    assert "steps no optimizer step: 24 rollouts end in 66 units of time, and a batch" in text
    assert read("batch=1024", "samplers=1")["why_no_step"].startswith("no optimizer step")


def test_a_narrow_terminal_and_one_without_blocks(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, printed().splitlines())) <= 40
    runner = CliRunner(charset="ascii")
    done = runner.invoke(app, ["simulate", "--sweep", "batch=2,4"], catch_exceptions=False)
    assert done.stdout.isascii()
    done = runner.invoke(app, ["simulate", "precision=fp4"], catch_exceptions=False)
    assert done.stdout.isascii()
    assert "-" in done.stdout.splitlines()[1]


def in_a_terminal(**environment: str) -> str:
    """What a process writes to a terminal."""
    ours, theirs = os.openpty()
    code = "from lightning_qrl.cli import main; import sys; sys.argv = ['qrl', 'simulate']; main()"
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=theirs,
        env={**inherited, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    parts = []
    with contextlib.suppress(OSError):  # a terminal that nobody writes to any more
        while part := os.read(ours, 65536):
            parts.append(part)
    assert process.wait() == 0
    os.close(ours)
    return b"".join(parts).decode()


COLOUR = re.compile(r"\x1b\[(\d+;)*3\d")


def test_colours_are_for_terminals_that_want_them():
    assert COLOUR.search(in_a_terminal())
    assert not COLOUR.search(in_a_terminal(NO_COLOR="1"))
    assert "\x1b" not in printed()


def test_a_sweep_is_its_single_runs():
    points = read("--preset", "fp4_naive", "--sweep", "max_staleness=0..3")["points"]
    for cap, point in enumerate(points):
        settings = Settings(**NAIVE, max_staleness=cap)
        assert point["settings"] == asdict(settings)
        summary = asdict(summarize(simulate(settings)))
        assert point.pop("notes") == []
        del point["settings"]
        assert point == as_json(summary)
    assert [point["diverged_at_step"] for point in points] == [None, None, 19, 15]


def test_a_sweep_over_one_setting_is_a_table():
    lines = printed("--preset", "fp4_naive", "--sweep", "max_staleness=0..3").splitlines()
    assert lines[0].split() == [
        "max_staleness", "reward", "steps", "drift", "diverged", "stale", "lost", "train", "sample",
    ]  # fmt: skip
    assert lines[1].split() == ["0", "0.694", "━━━", "16", "0.85", "0.00", "0", "42%", "37%"]
    assert lines[3].split()[:6] == ["2", "0.085", "33", "3.34", "!", "at"]
    assert "stable      max_staleness=0,1" in lines
    assert not [line for line in lines if "best" in line]  # one seed says nothing of a best
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("seeds", [[], ["--seeds", "2"]])
def test_a_table_drops_columns_that_do_not_fit(monkeypatch, seeds):
    heads, bars = {}, {}
    for columns in ("40", "80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = printed("--sweep", "shared_experts=true,false", *seeds).splitlines()
        assert max(map(len, lines)) <= int(columns)
        heads[columns], bars[columns] = lines[0].split(), "━" in lines[1]
    assert heads["40"][:2] == ["shared_experts", "reward"]
    assert len(heads["40"]) < len(heads["80"]) <= len(heads["120"])
    assert bars["120"]
    assert not bars["40"]


def test_a_sweep_over_two_settings_is_a_heat_map():
    axes = ["--sweep", "precision=bf16,fp4", "--sweep", "max_staleness=0..3"]
    lines = printed("bf16_tail=false", "backward=high_precision", *axes).splitlines()
    assert lines[:5] == [
        "            max_staleness",
        "precision   0      1      2      3",
        "bf16       ░0.60  ▒0.63  ▒0.65  ▒0.65",
        "fp4        ▓0.69  █0.74  !0.08  !0.08",
        "final reward: ░ 0.60 to █ 0.74; ! diverged",
    ]
    assert "stable      precision=bf16: all of max_staleness" in lines
    assert "stable      precision=fp4: max_staleness=0,1" in lines
    alike = printed("--sweep", "max_staleness=0..8", "--sweep", "batch=4,8", "precision=bf16")
    assert "stable      max_staleness=0..8: all of batch" in alike.splitlines()


def test_a_wide_heat_map_is_shades_in_bands(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = printed("--sweep", "batch=4,1000", "--sweep", "seed=0..39").splitlines()
    assert max(map(len, lines[:8])) <= 40
    assert lines[0] == "       seed 0 to 32"
    assert len(lines[2]) == 7 + 33
    assert lines[3] == "1000   " + 33 * "-"
    assert lines[4] == "       seed 33 to 39"
    assert "- no optimizer step" in printed("--sweep", "batch=4,1000", "--sweep", "seed=0..2")


def test_a_comparison():
    text = printed("--compare", "fp4_naive", "precision=fp4,four_over_six=true", "batch=2")
    a = simulate(Settings(**NAIVE, batch=2))
    b = simulate(Settings(precision="fp4", four_over_six=True, batch=2))
    rows = [line.split() for line in text.splitlines()]
    assert ["settings", "A", "B"] in rows
    assert ["four_over_six", "false", "true"] in rows
    assert ["bf16_tail", "false", "true"] in rows
    assert not [row for row in rows if row[:1] == ["batch"]]
    steps = len(a.steps), len(b.steps)
    assert ["steps", *map(str, steps), f"{steps[1] - steps[0]:+d}"] in rows
    rewards = a.final_reward, b.final_reward
    assert ["reward", *(f"{r:.3f}" for r in rewards), f"{rewards[1] - rewards[0]:+.3f}"] in rows
    assert sum(row[:1] == ["trainer"] and len(row) == 2 for row in rows) == 2
    assert max(map(len, text.splitlines())) <= 80


def test_a_comparison_as_json():
    made = read("--compare", "fp4_naive", "bf16", "batch=8")
    trace = simulate(Settings(**NAIVE, batch=8))
    assert made["A"]["final_reward"] == trace.final_reward
    for name in ("rollouts", "steps"):
        assert made["A"][f"all_{name}"] == as_json([asdict(one) for one in getattr(trace, name)])
    assert made["B"]["settings"] == asdict(Settings(precision="bf16", batch=8))


@pytest.mark.parametrize(
    ("arguments", "file", "values"),
    [
        (["--page"], PAGE, {}),
        (["--page", "precision=fp4"], PAGE, {"precision": "fp4"}),
        (["--page", "out.html", "precision=fp4"], "out.html", {"precision": "fp4"}),
        (["precision=fp4", "--page=out.html"], "out.html", {"precision": "fp4"}),
        (["--page", "--preset", "fp4_full"], PAGE, FULL),
        (["--page", "batch=8.html"], "batch=8.html", {}),
    ],
)
def test_the_page(here, arguments, file, values):
    assert printed(*arguments) == f"page  {file}\n"
    write_page(here / "expected", Settings(**values))
    assert (here / file).read_text() == (here / "expected").read_text()
    assert len(list(here.iterdir())) == 2


def test_a_page_has_a_file_where_none_follows():
    assert with_page_file(["--page"]) == ["--page", PAGE]
    assert with_page_file(["--page", "a", "b=1"]) == ["--page", "a", "b=1"]
    assert with_page_file(["--page=a", "b=1"]) == ["--page=a", "b=1"]
    assert with_page_file(["--", "--page"]) == ["--", "--page"]
    assert with_page_file(["a=1"]) == ["a=1"]


def test_help_names_every_setting_and_preset():
    assert SETTINGS.partition(";")[0].split(", ") == list(KEYS)
    assert PRESETS.split(", ") == list(simulator_settings.PRESETS)


LIGHT = "torch", "lightning", "mlflow", "matplotlib", "scipy", "pandas"


@pytest.mark.parametrize(
    "arguments",
    [[], ["--preset", "bf16", "batch=2"], ["--sweep", "batch=1..2"], ["--cluster", "duration=60"]],
    ids=" ".join,
)
def test_it_starts_without_anything_heavy(arguments):
    code = (
        "import sys\nfrom lightning_qrl.cli import main\n"
        f"sys.argv = ['qrl', 'simulate', *{arguments}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {LIGHT} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.strip() == "[]"
