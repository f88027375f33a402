"""`qrl simulate` with a calibration: against the equations, and fitted to runs in MLflow."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from recorded import Store
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.errors import UserError
from lightning_qrl.simulator.calibrated import Calibration
from lightning_qrl.simulator.calibrated.calibration import Domain, Part, Plan
from lightning_qrl.simulator.cluster import Cluster, largest_stable_staleness
from lightning_qrl.simulator.cluster import run as run_cluster
from lightning_qrl.simulator.constants import POST
from lightning_qrl.simulator.dynamics import mismatch, next_drift, next_reward
from lightning_qrl.tracking.notebook import History

LEARNING = replace(POST.learning, staleness_scale=0.004, reward_start=0.3, reward_rate=0.1)
FLOOR = 0.021
CALIBRATION = Calibration(
    learning=LEARNING,
    settling=0.0,
    erosion=0.0,
    erosion_power=1.0,
    plans={
        "four": Plan(floor=FLOOR, update_seconds=0.5, seconds_per_token=0.002),
        "bf16": Plan(floor=0.0),
    },
    intervals={},
    parts={name: Part(taken=True, fall=0.1, error=0.01) for name in ("drift", "settling")},
    goodness={},
    reference={},
    guessed=(),
    domain=Domain(runs=6, settings=6, largest_lag=1, steps=12, batch=(8, 8)),
    notes=("a note of its own",),
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "c.json").write_text(CALIBRATION.to_json())
    return tmp_path


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def read(*arguments: str):
    return json.loads(printed(*arguments, "--format", "json"))


FITTED = ["--calibration", "c.json", "plan=four"]


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
    both = read("--calibration", "c.json", "--compare", "plan=four", "plan=bf16", "max_staleness=3")
    assert both["A"]["final_reward"] == single["final_reward"]
    assert both["A"]["quantization_floor"] == FLOOR
    assert both["B"]["quantization_floor"] == 0.0


@pytest.mark.parametrize(
    ("group", "close"),
    [(1, 1e-9), (2, 5e-3)],  # of more than one completion, the outcome has the groups' ages alone
)
def test_a_cluster_has_learning_floor_and_times(group, close):
    settings = ["batch=8", f"group_size={group}", "samplers.slots=16", "lengths.mean=50"]
    settings += ["duration=60", "target_reward=0.5"]
    made = read("--cluster", *FITTED, *settings)
    cluster = Cluster.from_mapping(
        {
            "batch": 8, "group_size": group, "lengths": {"mean": 50}, "duration": 60,
            "samplers": {"slots": 16, "tokens_per_second": 1 / 0.002 / 16},
            "trainers": {"count": 1, "overhead": 0.5, "tokens_per_second": float("inf")},
            "learning": LEARNING, "floor": FLOOR, "target_reward": 0.5,
        }
    )  # fmt: skip
    expected = run_cluster(cluster)  # its learning is the model's own: no kicks, no noise
    assert made["steps"] == expected.steps > 10
    assert expected.staleness.largest > 1
    for name in ("mismatch", "drift", "reward"):
        found, model = np.array(made["learned"][name]), getattr(expected.learned, name)
        assert found[-10:] == pytest.approx(np.array(model[-10:]), rel=4 * close)
    assert made["target"] == pytest.approx(asdict(expected.target))
    assert "a note of its own" in made["notes"]
    headroom = largest_stable_staleness(cluster, 0.1)
    again = read("--cluster", *FITTED, *settings, "--margin", "0.1")
    assert again["headroom"]["max_staleness"] == headroom.max_staleness


def test_without_drift_nothing_is_said_of_stability(here):
    flat = replace(
        CALIBRATION,
        learning=replace(LEARNING, gain=0.0, feedback=0.0, drift_cost=0.0),
        parts={"drift": Part(taken=False, fall=0.0, error=0.1)},
    )
    (here / "c.json").write_text(flat.to_json())
    text = " ".join(printed(*FITTED).split())
    assert "drift no limit of stability follows from these constants" in text
    assert "did not diverge" not in text
    assert read(*FITTED)["critical_effective"] is None
    swept = printed(*FITTED, "--sweep", "max_staleness=1..2")
    assert "stable      no limit of stability follows" in swept
    with pytest.raises(UserError, match="--margin: the calibration does not identify drift"):
        printed("--cluster", *FITTED, "--margin", "0.1")


BAD = [
    (["--calibration", "c.json"], "--calibration: give plan=NAME, one of four, bf16"),
    (["--calibration", "c.json", "plan=for"], "the calibration has no plan for, only four, bf16"),
    ([*FITTED, "bf16_tail=false"], "bf16_tail does nothing with --calibration"),
    ([*FITTED, "--sweep", "four_over_six=true,false"], "four_over_six does nothing"),
    ([*FITTED, "--compare", "plan=four", "bf16"], "plan is given for both sides too"),
    (["--cluster", *FITTED, "floor=0.1"], "floor is the calibration's"),
    (["--cluster", "--calibration", "c.json"], "--calibration: give plan=NAME"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=lambda value: " ".join(value)[:40])
def test_what_does_not_go_with_it(arguments, says):
    with pytest.raises(UserError, match=says):
        printed(*arguments)


def test_the_page_has_the_constants_and_says_what_it_leaves_out(here):
    changed = replace(CALIBRATION, settling=0.25)
    (here / "c.json").write_text(changed.to_json())
    lines = printed(*FITTED, "--page").splitlines()
    assert lines[0] == "page  simulator.html"
    assert "note  the page's model has no settling; the calibration's is 0.25" in lines
    assert "0.004" in (here / "simulator.html").read_text()


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
    before = sorted(here.iterdir())
    with pytest.raises(UserError, match="a calibration needs"):
        printed("--calibrate", "few", "--save", "fit.json")
    assert sorted(here.iterdir()) == before

    done = CliRunner().invoke(
        app, ["simulate", "--calibrate", "grid", "--save", "fit.json"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "left out: 1 of 9 runs, which are not finished" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("8 runs of 4 settings, up to 30 steps of 8 groups")
    assert lines[-1] == "calibration  fit.json"
    found = Calibration.from_json((here / "fit.json").read_text())
    assert list(found.plans) == ["four"]
    for name in ("staleness_scale", "staleness_power"):
        low, high = found.intervals[name]
        assert 0.5 * low < getattr(LEARNING, name) < 2 * high
    assert printed("--calibration", "fit.json", "plan=four")
