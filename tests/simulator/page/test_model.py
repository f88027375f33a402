"""The page's model against Python's: V8 runs it, bare."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from py_mini_racer import MiniRacer

from lightning_qrl.simulator.closed_forms import critical_effective, plateau
from lightning_qrl.simulator.constants import POST, Constants, Kick
from lightning_qrl.simulator.page.values import model_constants, plain
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings
from lightning_qrl.simulator.summary import summarize

TABLE = Path(__file__).parents[1] / "simulator_table.json"
HORIZONS, BACKWARDS = ("short", "short", "med", "med", "long"), ("high_precision", "dequantized")
PER_CALL = 50
SHOWN = ("optimizer_steps", "final_reward", "final_drift", "diverged_at_step", "quantization_floor",
         "mean_effective", "critical_effective", "drift_plateau", "mean_staleness", "discarded",
         "why_no_step")  # fmt: skip

Job = tuple[Settings, Constants]


@pytest.fixture(scope="module")
def v8() -> MiniRacer:
    racer = MiniRacer()
    for script in ("dynamics.js", "model.js", "summary.js"):
        racer.eval((files("lightning_qrl.simulator.page") / script).read_text())
    racer.eval("""const runs = (text) => {
        const { settings, constants } = JSON.parse(text);
        return JSON.stringify(settings.map((one) => {
            const trace = simulate(one, constants);
            return { trace, summary: summarize(trace, constants) };
        }));
    }""")
    return racer


def browser(v8: MiniRacer, settings: list[Settings], constants: Constants = POST) -> list[Any]:
    given = {"settings": [plain(one) for one in settings], "constants": model_constants(constants)}
    return json.loads(v8.call("runs", json.dumps(given)))


def python(settings: Settings, constants: Constants) -> dict[str, Any]:
    trace = simulate(settings, constants)
    summary = {key: getattr(summarize(trace, constants), key) for key in SHOWN}
    both = plain(trace) | {"optimizer_steps": trace.optimizer_steps}
    return {"trace": both, "summary": summary}


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where two plain values differ: floats by more than 1e-9, anything else at all."""
    if ours == theirs:
        return
    if isinstance(ours, dict):
        if not isinstance(theirs, dict) or ours.keys() != theirs.keys():
            yield f"{path}: other keys"
            return
        for key, value in ours.items():
            yield from differences(value, theirs[key], f"{path}.{key}")
    elif isinstance(ours, list):
        if not isinstance(theirs, list) or len(ours) != len(theirs):
            yield f"{path}: other length"
            return
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif isinstance(ours, float) and not isinstance(theirs, bool | None):
        if not math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{path}: {ours} and {theirs}"
    else:
        yield f"{path}: {ours} and {theirs}"


def drawn(draw: random.Random) -> Settings:
    return Settings(
        precision=draw.choice(("bf16", "fp8", "fp4", "fp4")),
        backward=draw.choice(BACKWARDS),
        bf16_tail=draw.random() < 0.5,
        shared_experts=draw.random() < 0.5,
        four_over_six=draw.random() < 0.5,
        max_staleness=draw.choice((0, 0, 1, 2, 3, 4, 6, 8, 20)),
        weight_sync=draw.random() < 0.5,
        batch=draw.choice((1, 2, 3, 4, 5, 8, 13, 16, 32)),
        horizon=draw.choice(HORIZONS),
        samplers=draw.choice((1, 2, 3, 4, 4, 4, 5, 6, 8, 11, 16)),
        seed=draw.choice((0, 0, 1, 2, draw.randrange(2**31))),
    )


def assert_the_same(v8: MiniRacer, settings: list[Settings], constants: Constants = POST) -> None:
    for first in range(0, len(settings), PER_CALL):
        some = settings[first : first + PER_CALL]
        for one, theirs in zip(some, browser(v8, some, constants), strict=True):
            different = list(differences(python(one, constants), theirs))
            assert not different, (one, different[:5])


def test_a_thousand_random_settings_run_the_same(v8):
    draw = random.Random(20260710)
    settings = [drawn(draw) for _ in range(1000)]
    assert_the_same(v8, settings)


def test_the_table_of_the_post_comes_out_of_the_browser(v8):
    rows = json.loads(TABLE.read_text())
    keys = ("horizon", "batch", "max_staleness", "weight_sync")
    runs = browser(v8, [Settings(**PRESETS[row["config"]], **{key: row[key] for key in keys})
                        for row in rows])  # fmt: skip
    assert len(rows) == 288
    for row, run in zip(rows, runs, strict=True):
        trace = run["trace"]
        for key in ("optimizer_steps", "diverged_at_step", "discarded"):
            assert trace[key] == row[key], row
        got = (trace["final_reward"], trace["final_drift"], trace["mean_staleness"], trace["floor"])
        digits = {"final_reward": 3, "final_drift": 2, "mean_staleness": 2, "quantization_floor": 4}
        for value, (key, places) in zip(got, digits.items(), strict=True):
            # Rounding a tie may go either way, so half a unit of the last digit, and no more.
            assert abs(value - row[key]) <= 0.5 * 10**-places + 1e-9, (row, key)


def shaken(value: Any, draw: random.Random) -> Any:
    """The same value with every float up to 5% smaller or larger."""
    if is_dataclass(value):
        return replace(
            value, **{item.name: shaken(getattr(value, item.name), draw) for item in fields(value)}
        )
    if isinstance(value, float):
        return value * draw.uniform(0.95, 1.05)
    if isinstance(value, tuple):
        return tuple(shaken(item, draw) for item in value)
    if hasattr(value, "items"):
        return {key: shaken(item, draw) for key, item in value.items()}
    return value


def test_no_number_of_the_model_is_its_own(v8):
    draw = random.Random(7)
    for _ in range(25):
        constants = replace(shaken(POST, draw), seeds=tuple(draw.sample(range(10**6), 3)))
        share = min(0.999, constants.times.draw_share)
        constants = replace(constants, times=replace(constants.times, draw_share=share))
        kick = Kick(size=draw.uniform(0.1, 1), probability=draw.uniform(0.1, 0.5))
        constants = replace(constants, plain_kick=kick)
        assert_the_same(v8, [drawn(draw) for _ in range(4)], constants)


def test_a_higher_cap_changes_nothing_where_none_is_discarded(v8):
    draw = random.Random(11)
    lower = [replace(drawn(draw), max_staleness=draw.randint(1, 5)) for _ in range(100)]
    higher = [replace(one, max_staleness=one.max_staleness + 1) for one in lower]
    alike = 0
    for one, other in zip(browser(v8, lower), browser(v8, higher), strict=True):
        if one["trace"]["discarded"] == 0:  # as the page takes it for granted
            del one["trace"]["settings"], other["trace"]["settings"]
            assert one == other
            alike += 1
    assert alike > 20


def test_a_run_without_a_step_says_the_same_in_both(v8):
    one = Settings(precision="bf16", horizon="long", batch=32, samplers=1)
    assert simulate(one).why_no_step
    assert_the_same(v8, [one])


def test_the_fixed_point_is_pythons(v8):
    draw = random.Random(3)
    for _ in range(200):
        learning = shaken(POST, draw).learning
        effective = draw.uniform(0, 0.05)
        given = json.dumps(plain(learning))
        theirs = v8.eval(f"plateau({effective!r}, {given})")
        ours = plateau(effective, learning)
        assert theirs == (None if ours is None else pytest.approx(ours, rel=1e-9))
        critical = v8.eval(f"criticalEffective({given})")
        assert critical == pytest.approx(critical_effective(learning), rel=1e-12)


def test_numbers_are_written_as_python_writes_them(v8):
    draw = random.Random(5)
    numbers = [draw.choice((draw.uniform(-3, 3), draw.randint(-99, 99) / 2 ** draw.randint(0, 6)))
               for _ in range(400)]  # fmt: skip
    for digits in range(5):
        theirs = v8.eval(f"JSON.stringify({numbers!r}.map((one) => fixed(one, {digits})))")
        assert json.loads(theirs) == [f"{number:.{digits}f}" for number in numbers]
