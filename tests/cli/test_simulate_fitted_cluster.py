"""`qrl simulate --cluster` with a calibration: against the cluster itself, and by hand."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from fitted import CALIBRATION, CLUSTER, FLOOR, LEARNING, printed, read

from lightning_qrl.simulator.cluster import Cluster, largest_stable_staleness
from lightning_qrl.simulator.cluster import run as run_cluster


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "c.json").write_text(CALIBRATION.to_json())
    return tmp_path


def test_a_cluster_starts_as_what_the_runs_were():
    """A step takes the runs' seconds; 8 groups of 5 are 40 completions of 10 tokens."""
    made = read(*CLUSTER, "max_staleness=0")
    assert made["steps"] == 12
    assert made["seconds"] == pytest.approx(12 * (0.8 + 0.5), rel=1e-5)
    assert made["trained_per_second"] == pytest.approx(400 / 1.3, rel=1e-5)
    assert (made["gpu_hours"], made["cost"]) == (0, 0)
    text = printed(*CLUSTER)
    assert "GPU" not in text.replace("GPU-", "")
    assert "cost" not in text
    unlike = ("is not the", "are not the", "is not one of", "more than the", "share the speed")
    assert not any(word in note for note in made["notes"] for word in unlike)


def test_a_cluster_has_learning_floor_and_times():
    settings = ["group_size=1", "samplers.slots=16", "lengths.mean=50", "duration=60"]
    settings += ["target_reward=0.5", "trainers.gpus=2"]
    made = read(*CLUSTER, *settings)
    cluster = Cluster.from_mapping(
        {
            "batch": 8, "group_size": 1, "lengths": {"mean": 50}, "duration": 60,
            "samplers": {"slots": 16, "tokens_per_second": 400 / 0.8 / 16, "gpus": 0},
            "trainers": {"count": 1, "overhead": 0, "tokens_per_second": 400 / 0.5, "gpus": 2},
            "weights": {"parameters": 0, "latency": 0},
            "learning": LEARNING, "floor": FLOOR, "target_reward": 0.5,
        }
    )  # fmt: skip
    expected = run_cluster(cluster)  # its learning is the model's own: no kicks, no noise
    assert made["steps"] == expected.steps > 10
    assert expected.staleness.largest > 1
    for name in ("mismatch", "drift", "reward"):
        found, model = np.array(made["learned"][name]), getattr(expected.learned, name)
        assert found[-10:] == pytest.approx(np.array(model[-10:]), rel=1e-8)
    assert made["target"] == pytest.approx(asdict(expected.target))
    assert made["gpu_hours"] == pytest.approx(2 * 60 / 3600)
    headroom = largest_stable_staleness(cluster, 0.1)
    again = read(*CLUSTER, *settings, "--margin", "0.1")
    assert again["headroom"]["max_staleness"] == headroom.max_staleness


def test_groups_are_held_against_the_ages_of_their_tokens():
    settings = ["group_size=2", "lengths.mean=50", "duration=60"]
    made = read(*CLUSTER, *settings, "lengths.spread=0.5")
    whole = run_cluster(Cluster.from_mapping({**made["settings"], "learning": LEARNING}))
    assert whole.steps == made["steps"] > 10
    found = np.array(made["learned"]["mismatch"][-10:])
    assert found == pytest.approx(np.array(whole.learned.mismatch[-10:]), rel=2e-2)


BEYOND = [
    ("group_size=8", "group_size=8 is not the 5 that the runs show"),
    ("samplers.slots=99", "samplers.slots=99 share the speed that the runs' 40 completions had"),
    ("lengths.mean=90", "completions of 90 tokens are not the 10 that the runs show"),
    ("lengths.mean=90", "a phase of training takes 0.5 s for each 400 tokens, as in the runs"),
    ("batch=16", "a phase of training takes 0.5 s for each 400 tokens, as in the runs"),
    ("batch=16", "a batch of 16 groups is not one of the 8 that the runs show"),
    ("updates=2", "updates=2 of a phase take together as long as the runs' one"),
    ("steps=40", "40 steps are more than the 12 that the runs show"),
    ("trainers.tokens_per_second=9", "trainers: their speed is what was set"),
    ("trainers.overhead=1", "trainers: their speed is what was set"),
    ("samplers.tokens_per_second=9", "samplers: their speed is what was set"),
]


@pytest.mark.parametrize(("setting", "says"), BEYOND)
def test_where_a_cluster_leaves_the_runs_a_note_says_so(setting, says):
    assert not any(says in note for note in read(*CLUSTER)["notes"][1:])
    assert any(note.startswith(says) for note in read(*CLUSTER, setting)["notes"])


def test_the_calibrations_notes_are_there_without_a_step():
    made = read(*CLUSTER, "duration=0.1")
    assert made["why_no_step"]
    assert "a note of its own" in made["notes"]


def test_a_list_of_pools_has_its_own_speeds(here):
    (here / "two.yaml").write_text(
        "samplers: [{slots: 8, tokens_per_second: 5}, {slots: 32, tokens_per_second: 2}]\n"
    )
    made = read(*CLUSTER, "--settings", "two.yaml")
    assert "samplers: their speed is what was set, not the calibration's" in made["notes"]


def test_a_sweep_of_slots_shares_one_speed():
    points = read(*CLUSTER, "--sweep", "samplers.slots=20,40", "max_staleness=0")["points"]
    assert points[1]["seconds"] == pytest.approx(12 * 1.3, rel=1e-5)
    assert points[0]["seconds"] == pytest.approx(12 * 1.3, rel=1e-5)


def test_a_margin_says_what_it_leaves_out(here):
    said = "--margin judges without the calibration's settling: by the mismatch of a policy"
    settings = [*CLUSTER, "duration=60", "--margin", "0.1"]
    assert not any(said in note for note in read(*settings)["notes"])
    (here / "c.json").write_text(replace(CALIBRATION, settling=0.25).to_json())
    assert any(note.startswith(said) for note in read(*settings)["notes"])
