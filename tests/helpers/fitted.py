"""A calibration by hand, and `qrl simulate` with it."""

import json
from dataclasses import replace

from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.simulator.calibrated import Calibration
from lightning_qrl.simulator.calibrated.calibration import PARTS, Domain, Part, Plan
from lightning_qrl.simulator.constants import POST

LEARNING = replace(POST.learning, staleness_scale=0.004, reward_start=0.3, reward_rate=0.1)
FLOOR = 0.021
CALIBRATION = Calibration(
    learning=LEARNING,
    settling=0.0,
    erosion=0.0,
    erosion_power=1.0,
    plans={
        "four": Plan(floor=FLOOR, sampling_seconds=0.8, update_seconds=0.5, tokens=400.0),
        "bf16": Plan(floor=0.0, sampling_seconds=1.6, update_seconds=0.4, tokens=400.0),
        "odd": Plan(floor=0.0),
    },
    intervals={},
    parts={name: Part(taken=True, fall=0.1, error=0.01) for name in PARTS},
    goodness={},
    goodness_of_lags={},
    reference={},
    guessed=(),
    domain=Domain(runs=6, settings=6, largest_lag=1, steps=12, batch=(8, 8), group_size=5),
    notes=("a note of its own",),
)

FITTED = ["--calibration", "c.json", "plan=four"]
CLUSTER = ["--cluster", *FITTED]


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def read(*arguments: str):
    return json.loads(printed(*arguments, "--format", "json"))
