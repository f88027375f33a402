"""`qrl simulate` with a calibration: against the equations, and fitted to runs in MLflow."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from fitted import CALIBRATION, CLUSTER, FITTED, FLOOR, LEARNING, printed, read
from recorded import Store
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.errors import UserError
from lightning_qrl.simulator.calibrated import Calibration
from lightning_qrl.simulator.calibrated.calibration import PARTS, Part
from lightning_qrl.simulator.dynamics import mismatch, next_drift, next_reward
from lightning_qrl.tracking.notebook import History


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "c.json").write_text(CALIBRATION.to_json())
    return tmp_path


def by_hand(all_ages, floor=FLOOR):
    """Mismatch, drift and reward of each step, by the equations; neither kicks nor noise."""
    drift, reward, made = 0.0, LEARNING.reward_start, []
    for ages in all_ages:
        of = mismatch(ages, floor, LEARNING)
        drift = next_drift(drift, of.effective, LEARNING)
        reward = next_reward(reward, of.mean, drift, LEARNING)
        made.append((of.mean, drift, reward))
    return made


def test_a_run_has_what_was_fitted():
    made = read(*FITTED, "max_staleness=3", "batch=4")
    assert made["diverged_at_step"] is None
    expected = by_hand([step["ages"] for step in made["all_steps"]])
    found = [(s["mismatch"], s["drift"], s["reward"]) for s in made["all_steps"]]
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-9)
    assert made["final_reward"] == made["all_steps"][-1]["reward"]
    assert made["final_drift"] == made["all_steps"][-1]["drift"]
    assert made["quantization_floor"] == FLOOR


def test_what_is_beyond_the_runs_is_said():
    notes = read(*FITTED, "max_staleness=3")["notes"]
    assert notes[0] == "a note of its own"
    assert any("staleness" in note and "beyond the 0 to 1" in note for note in notes)
    assert any("steps are more than the 12" in note for note in notes)
    assert any("a batch of 4 groups" in note for note in notes)
    text = " ".join(printed(*FITTED, "max_staleness=3").split())
    assert "note a note of its own" in text
    assert "note a batch of 4 groups is not one of the 8 that the runs show" in text


def test_sweeps_and_comparisons_have_it_too():
    point = read(*FITTED, "--sweep", "max_staleness=3,4")["points"][0]
    single = read(*FITTED, "max_staleness=3")
    assert point["final_reward"] == single["final_reward"]
    assert point["mean_mismatch"] == single["mean_mismatch"]
    assert point["notes"] == single["notes"]
    text = " ".join(printed(*FITTED, "--sweep", "max_staleness=3,4").split())
    assert "note a batch of 4 groups is not one of the 8 that the runs show" in text


def test_the_plan_is_among_the_settings_and_precision_is_not():
    made = read(*FITTED, "max_staleness=3")
    assert made["settings"] == {
        "plan": "four", "max_staleness": 3, "weight_sync": False, "batch": 4, "horizon": "med",
        "samplers": 4, "seed": 0,
    }  # fmt: skip
    assert "settings    plan=four max_staleness=3" in printed(*FITTED, "max_staleness=3")
    compared = ["--calibration", "c.json", "max_staleness=3", "--compare"]
    both = read(*compared, "plan=four", "plan=bf16")
    assert both["A"]["final_reward"] == made["final_reward"]
    assert [both[arm]["settings"]["plan"] for arm in "AB"] == ["four", "bf16"]
    assert [both[arm]["quantization_floor"] for arm in "AB"] == [FLOOR, 0.0]
    text = printed(*compared, "plan=four", "plan=bf16")
    assert "settings     A     B\nplan      four  bf16\n" in text
    points = read(*FITTED[:2], "--sweep", "plan=four,bf16", "max_staleness=3")["points"]
    assert [point["settings"]["plan"] for point in points] == ["four", "bf16"]
    assert [p["final_reward"] for p in points] == [both[arm]["final_reward"] for arm in "AB"]
    for word in ("fp8", "fp4", "dequantized"):
        assert word not in text + json.dumps([made, both])


def test_times_are_those_of_the_plan_over_bf16s():
    """A rollout takes half the time, a step 1.25 times the post's 1.7."""
    four, bf16 = (read("--calibration", "c.json", f"plan={name}") for name in ("four", "bf16"))
    assert (
        "times of four over those of bf16, as in the runs: rollouts 0.50, steps 1.25"
        in four["notes"]
    )
    assert not any("times" in note for note in bf16["notes"])
    post = read("precision=bf16")
    for made, sampling, update in ((four, 0.5, 1.25), (bf16, 1.0, 1.0)):
        first, reference = made["all_rollouts"][0], post["all_rollouts"][0]
        lasted = [rollout["end"] - rollout["start"] for rollout in (first, reference)]
        assert lasted[0] == pytest.approx(sampling * lasted[1], abs=0.05)
        step = made["all_steps"][0]
        assert step["end"] - step["start"] == pytest.approx(1.7 * update, abs=0.05)


def test_times_that_are_not_known_are_the_posts(here):
    odd = read("--calibration", "c.json", "plan=odd", "weight_sync=true")
    said = "rollouts and steps take the post's BF16 times: the calibration does not have those of"
    assert f"{said} both odd and bf16" in odd["notes"]
    assert "a broadcast takes the post's BF16 time, whatever odd sends" in odd["notes"]
    post = read("precision=bf16", "weight_sync=true")
    times = [[step["start"] for step in made["all_steps"]] for made in (odd, post)]
    assert times[0] == times[1]


def test_without_drift_nothing_is_said_of_stability(here):
    flat = replace(
        CALIBRATION,
        learning=replace(LEARNING, gain=0.0, feedback=0.0, drift_cost=0.0),
        parts={name: Part(taken=name != "drift", fall=0.0, error=0.1) for name in PARTS},
    )
    (here / "c.json").write_text(flat.to_json())
    text = " ".join(printed(*FITTED).split())
    assert "drift no limit of stability follows from these constants" in text
    assert "did not diverge" not in text
    assert read(*FITTED)["critical_effective"] is None
    swept = printed(*FITTED, "--sweep", "max_staleness=1..2")
    assert "stable      no limit of stability follows" in swept
    compared = printed(*FITTED[:2], "--compare", "plan=four", "plan=bf16")
    assert re.search(r"^diverged +not known +not known$", compared, re.MULTILINE)
    with pytest.raises(UserError, match="--margin: the calibration does not identify drift"):
        printed("--cluster", *FITTED, "--margin", "0.1")


OURS = "with --calibration the plan says what precision does"
BAD = [
    (["--calibration", "c.json"], "--calibration: give plan=NAME, one of four, bf16, odd"),
    (["--calibration", "c.json", "plan=for"], "has no plan for, only four, bf16, odd"),
    (["--calibration", "c.json", "plan=true"], "has no plan true, only four"),
    *[([*FITTED, f"{key}={value}"], f"{key}: {OURS}; take it out")
      for key, value in (("precision", "fp8"), ("backward", "high_precision"),
                         ("bf16_tail", "false"), ("shared_experts", "true"))],
    ([*FITTED, "--sweep", "four_over_six=true,false"], f"four_over_six: {OURS}"),
    ([*FITTED, "--preset", "fp4_full"], f"--preset fp4_full: {OURS}"),
    ([*FITTED, "--recipe", "4bitter"], f"--recipe 4bitter: {OURS}"),
    (["--calibration", "c.json", "--compare", "plan=four", "bf16"], f"--compare bf16: {OURS}"),
    (["--calibration", "c.json", "--compare", "plan=four", "plan=bf16,precision=fp8"], OURS),
    ([*FITTED, "--compare", "plan=four", "batch=8"], "plan is given for both sides too"),
    (["--calibration", "c.json", "--compare", "plan=four", "batch=8"], "give plan=NAME"),
    ([*FITTED, "--page"], "--calibration does nothing with --page"),
    ([*CLUSTER, "floor=0.1"], "floor is the calibration's"),
    ([*CLUSTER, "--sweep", "floor=0.1,0.2"], "floor is the calibration's"),
    ([*CLUSTER, "trainers.count=2"], "trainers.count is 1 with --calibration"),
    ([*CLUSTER, "trainers.price=2"], "trainers.price does nothing with --calibration"),
    ([*CLUSTER, "samplers.price=2"], "samplers.price does nothing with --calibration"),
    ([*CLUSTER, "trainers=5"], "trainers is a mapping"),
    ([*CLUSTER, "samplers.slots=many"], "samplers.slots is a whole number"),
    (["--cluster", "--calibration", "c.json"], "--calibration: give plan=NAME"),
    (["--cluster", "--calibration", "c.json", "plan=odd"], "tokens_per_second is not known"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=lambda value: " ".join(value)[:40])
def test_what_does_not_go_with_it(arguments, says):
    with pytest.raises(UserError, match=says):
        printed(*arguments)


def record(store: Store, lag: int, seed: int, experiment: str, status: str = "FINISHED") -> None:
    """A run with the equations' own numbers and some noise."""
    random = np.random.default_rng((lag, seed))
    ages = [[min(step, lag)] for step in range(30)]
    made = np.array(by_hand(ages, 0.01))
    noisy = made * (1 + 0.05 * random.standard_normal(made.shape))
    at = np.arange(1, 31)
    shares = {f"async/staleness/lag_{k}": [float(age == [k]) for age in ages] for k in range(8)}
    metrics = {
        "train/sampling/sampling_logp_difference/mean": noisy[:, 0],
        "train/reward": noisy[:, 2],
        "async/staleness_mean": np.array([age[0] for age in ages], float),
        **{name: np.array(values) for name, values in shares.items()},
    }
    store.add(
        f"lag{lag}-{seed}",
        {name: History(at, values) for name, values in metrics.items()},
        experiment=experiment,
        tags={"qrl.recipe": "four", "qrl.recipe_hash": f"lag{lag}", "qrl.seed": str(seed)},
        params={"grpo.prompts_per_rollout": "8", "callbacks.forward_quantization.format": "nvfp4"},
        status=status,
    )


def test_a_calibration_of_runs_in_mlflow(here, monkeypatch):
    store = Store(here)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    record(store, 0, 0, "few")
    for lag in (0, 1, 2, 4):
        for seed in (0, 1):
            record(store, lag, seed, "grid")
    record(store, 4, 2, "grid", "FAILED")
    for experiment in ("few", "grid"):
        store.add("stopped", {}, experiment=experiment, status="KILLED")  # before its first step
    before = sorted(here.iterdir())
    with pytest.raises(UserError, match="a calibration needs .* has 1; .*; left out: 1 of 2 runs"):
        printed("--calibrate", "few", "--save", "fit.json")
    assert sorted(here.iterdir()) == before

    done = CliRunner().invoke(
        app, ["simulate", "--calibrate", "grid", "--save", "fit.json"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "left out: 2 of 10 runs, which are not finished" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("8 runs of 4 settings, up to 30 steps of 8 groups")
    assert lines[-1] == "calibration  fit.json"
    found = Calibration.from_json((here / "fit.json").read_text())
    assert list(found.plans) == ["four"]
    for name in ("staleness_scale", "staleness_power"):
        low, high = found.intervals[name]
        assert 0.5 * low < getattr(LEARNING, name) < 2 * high
    assert printed("--calibration", "fit.json", "plan=four")
