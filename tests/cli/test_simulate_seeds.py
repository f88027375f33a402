"""`qrl simulate --seeds`: means, deviations and shares are those of single runs."""

import json
import statistics

import pytest
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings
from lightning_qrl.simulator.summary import summarize

NAIVE = PRESETS["fp4_naive"]


def printed(*arguments: str) -> str:
    environment = {"COLUMNS": "80"}
    done = CliRunner().invoke(
        app, ["simulate", *arguments], env=environment, catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.stdout


def read(*arguments: str):
    return json.loads(printed(*arguments, "--format", "json"))


def test_many_seeds():
    runs = {
        cap: [
            summarize(simulate(Settings(**NAIVE, max_staleness=cap, seed=s))) for s in range(3, 11)
        ]
        for cap in (0, 1, 2)
    }
    arguments = ["--preset", "fp4_naive", "--seeds", "8", "seed=3"]
    made = read(*arguments, "--sweep", "max_staleness=0..2")["points"]
    for point, own in zip(made, runs.values(), strict=True):
        rewards = [run.final_reward for run in own]
        assert point["final_reward"] == pytest.approx(statistics.mean(rewards), abs=1e-12)
        assert point["reward_deviation"] == pytest.approx(statistics.stdev(rewards), abs=1e-12)
        assert (point["least_reward"], point["largest_reward"]) == (min(rewards), max(rewards))
        assert point["diverged"] == sum(not run.stable for run in own) / 8
        assert (point["first_seed"], point["seeds"]) == (3, 8)
    shares = [point["diverged"] for point in made]
    assert shares[0] == 0
    assert 0 < shares[1] < 1 == shares[2]
    rows = [
        line.split() for line in printed(*arguments, "--sweep", "max_staleness=0..2").splitlines()
    ]
    for row, point in zip(rows[1:4], made, strict=True):
        assert row[1:3] == [f"{point['final_reward']:.3f}", f"{point['reward_deviation']:.3f}"]
        assert f"{point['diverged']:.0%}" in row
    (alone,) = read(*arguments, "max_staleness=1")["points"]
    assert alone == made[1]
    text = " ".join(printed(*arguments, "max_staleness=1").split())
    assert f"diverged {shares[1]:.0%} of the runs" in text
    assert f"reward {made[1]['final_reward']:.3f}, standard deviation" in text


def test_many_seeds_over_two_settings():
    axes = ["--sweep", "max_staleness=0..2", "--sweep", "batch=4,1000"]
    lines = printed("--preset", "fp4_naive", "--seeds", "4", *axes).splitlines()
    assert lines[1].split() == ["max_staleness", "4", "1000"]
    assert [line.split()[-1] for line in lines[2:5]] == ["-"] * 3
    assert lines[2].split()[2] == "0%"
    assert lines[4].split()[1].startswith("!")
    assert lines[4].split()[2] == "100%"
