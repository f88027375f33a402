"""`qrl simulate --cluster` prints what the model of a cluster gives, and the settings of it."""

import json
import time
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from lightning_qrl.cli import app
from lightning_qrl.errors import UserError
from lightning_qrl.simulator.cluster import Cluster, largest_stable_staleness, run

SMALL = ["samplers.slots=64", "lengths.mean=400", "batch=4", "group_size=4", "duration=600"]
SMALL_VALUES = {
    "samplers": {"slots": 64},
    "lengths": {"mean": 400},
    "batch": 4,
    "group_size": 4,
    "duration": 600,
}
FILE = "samplers: {slots: 64}\nlengths: {mean: 400}\nbatch: 8\ngroup_size: 4\nduration: 600\n"
TOY = "say nothing of your own policy; --calibration FILE replaces them"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def printed(*arguments: str) -> str:
    asked = ["simulate", "--cluster", *arguments]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def words(*arguments: str) -> str:
    return " ".join(printed(*arguments).split())


def read(*arguments: str):
    return json.loads(printed(*arguments, "--format", "json"))


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, ["simulate", "--cluster", *arguments], catch_exceptions=False)
    (line,) = str(error.value).splitlines()
    return line


def as_json(value):
    return json.loads(json.dumps(value))


def test_a_cluster(here):
    outcome = run(Cluster.from_mapping(SMALL_VALUES))
    text = words(*SMALL)
    assert f"steps {outcome.steps} in 0.17 h: {outcome.steps_per_hour:,.1f} an hour" in text
    assert f"samplers busy {outcome.samplers.busy:.1%}" in text
    assert f"GPU-hours {outcome.gpu_hours:.3g}, at ${outcome.cost:.2f}" in text
    assert f"rollouts mean {outcome.staleness.mean:.2f} versions" in text
    made = read(*SMALL)
    assert Cluster.from_mapping(made.pop("settings")) == Cluster.from_mapping(SMALL_VALUES)
    assert made == as_json(asdict(outcome))


def test_settings_that_are_not_the_defaults_are_printed(here):
    text = words(*SMALL)
    assert "settings samplers.slots=64 lengths.mean=400 group_size=4 batch=4 duration=600 " in text
    assert "settings the defaults " in words()
    (here / "c.yaml").write_text("samplers: [{slots: 3}, {slots: 4}]\nlengths: {values: [9, 8]}\n")
    text = words("--settings", "c.yaml", "duration=60")
    assert "samplers=[{slots: 3}, {slots: 4}] lengths.values=[9, 8] duration=60" in text


def test_what_it_costs_is_left_out_without_gpus():
    free = ["samplers.gpus=0", "trainers.gpus=0"]
    text = printed(*SMALL, *free, "target_reward=0.5")
    assert "GPU" not in text
    assert "target      reward 0.5 after" in text
    text = words(*SMALL, "target_reward=0.5")
    assert text.count("GPU-hours") == 2


def test_a_file_under_overrides(here):
    (here / "c.yaml").write_text(FILE)
    assert read("--settings", "c.yaml", "batch=4") == read(*SMALL)
    (here / "again.yaml").write_text(json.dumps(read(*SMALL)["settings"]))
    assert read("--settings", "again.yaml") == read(*SMALL)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch: null", "c.yaml: batch is a whole number, got null"),
        ("samplers: {slot: 3}", "c.yaml: samplers.slot is unknown; did you mean samplers.slots"),
        ("samplers: {tokens_per_second: inf}\nqueue_depth: null", "c.yaml: samplers.tokens_per_"),
        ("weight_sync_every: 4", "c.yaml: weight_sync_every=4 leaves the samplers"),
        ("[1, 2]", "c.yaml: it has no keys; write a setting a line, as batch: 32"),
        ("batch", "c.yaml: it has no keys"),
        ("batch: [1", "c.yaml: line 1: it is no YAML: expected ',' or ']'"),
        ("batch: 1\nbatch: 2", "c.yaml: line 2: key batch is given twice"),
        (b"\xff", "--settings c.yaml cannot be read: it is no text"),
    ],
)
def test_what_is_wrong_in_a_file(here, text, says):
    (here / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert refused("--settings", "c.yaml").startswith(says)


def test_what_is_wrong_beside_a_file(here):
    (here / "c.yaml").write_text("batch: 2")
    assert refused("--settings", "c.yaml", "samplers.slots=0").startswith("samplers.slots must be")
    assert refused("--settings", "no.yaml") == (
        "--settings no.yaml cannot be read: No such file or directory"
    )


def test_an_infinite_number_as_text(here):
    (here / "c.yaml").write_text("samplers: {tokens_per_second: inf}\n")
    assert read("--settings", "c.yaml", *SMALL) == read(*SMALL, "samplers.tokens_per_second=.inf")


def test_a_sweep():
    axes = ["--sweep", "batch=2,4"]
    given = [*SMALL[:2], *SMALL[3:]]
    made = read(*given, *axes)
    for batch, point in zip((2, 4), made["points"], strict=True):
        cluster = Cluster.from_mapping({**SMALL_VALUES, "batch": batch})
        expected = run(cluster)
        assert point["at"] == {"batch": batch}
        assert point["steps_per_hour"] == expected.steps_per_hour
        assert Cluster.from_mapping({**made["settings"], **point["at"]}) == cluster
    lines = printed(*given, *axes).splitlines()
    assert lines[0].startswith("settings    samplers.slots=64 lengths.mean=400 group_size=4 dur")
    assert lines[1].split()[:3] == ["batch", "steps/h", "stale"]
    assert lines[3].split()[1] == f"{expected.steps_per_hour:,.1f}"
    assert f"{expected.rollouts.discarded_share:.1%}" in lines[3]
    given = [*SMALL[1:2], *SMALL[3:]]
    maps = printed(*given, *axes, "--sweep", "samplers.slots=32,48").splitlines()
    assert [line.split() for line in maps[1:3]] == [["samplers.slots"], ["batch", "32", "48"]]
    titles = [line.partition(":")[0] for line in maps if " to " in line]
    shares = ["rollouts discarded, %", "samplers busy, %", "trainers busy, %"]
    assert titles == ["steps an hour", "mean staleness", *shares]


def test_what_is_impossible_is_marked_in_its_place():
    axes = ["--sweep", "max_staleness=0..2", "--sweep", "weight_sync_every=1,2"]
    text = printed(*SMALL, *axes)
    rows = [line for line in text.splitlines() if line.split()[:1] == ["0"]]
    assert [row.split()[-1] for row in rows] == ["x"] * 5  # a map for each measure
    assert text.count("x impossible") == 5
    reason = "weight_sync_every=2 leaves the samplers with weights that are up to 1 behind"
    assert " ".join(text.split()).count(f"x max_staleness=0 weight_sync_every=2: {reason}") == 1
    points = read(*SMALL, *axes)["points"]
    assert [point["at"] for point in points if "impossible" in point] == [
        {"max_staleness": 0, "weight_sync_every": 2}
    ]
    assert points[1]["impossible"].startswith(reason)
    table = printed(*SMALL, "--sweep", "weight_sync_every=1..4")
    assert [line.split()[0] for line in table.splitlines() if "x impossible" in line] == ["4"]


def test_a_sweep_that_is_impossible_everywhere():
    assert refused("--sweep", "batch=0..0") == "batch must be at least 1 and at most 1e+06, got 0"
    assert refused("--sweep", "bach=1,2").startswith("bach is unknown; did you mean batch")
    assert refused("batch=3", "--sweep", "batch=1,2").startswith("--sweep batch: KEY=VALUE says")


def test_a_sweep_of_pools(here):
    (here / "c.yaml").write_text("samplers: [{slots: 3}]")
    said = refused("--settings", "c.yaml", "--sweep", "samplers.slots=1,2")
    assert said.startswith("--sweep samplers.slots: c.yaml has a list of pools")


@pytest.mark.parametrize(
    "arguments",
    [
        ["duration=316000000"],
        ["steps=10000000", "duration=null"],
        ["updates=1000", "max_staleness=null", "steps=10000000", "duration=null"],
        ["samplers.slots=1000000", "batch=1000000", "group_size=100000"],
        ["--margin", "0.1", "duration=10000000"],
        ["--sweep", "seed=0..2499"],
    ],
    ids=" ".join,
)
def test_what_would_take_long_is_refused_at_once(arguments):
    start = time.process_time()
    said = refused(*arguments)
    assert time.process_time() - start < 10
    assert "to simulate" in said
    assert "; lower " in said


def test_that_the_constants_are_a_toy_s_is_said():
    assert TOY in words(*SMALL)
    assert words(*SMALL, "--sweep", "seed=1,2").count(TOY) == 1
    assert TOY in read(*SMALL)["notes"][-1]
    assert TOY not in words(*SMALL, "learning.gain=5")
    assert TOY not in words("duration=1")


def test_the_largest_stable_staleness():
    long = [*SMALL[:-1], "duration=1800"]
    headroom = largest_stable_staleness(
        Cluster.from_mapping({**SMALL_VALUES, "duration": 1800}), 0.2
    )
    made = read(*long, "--margin", "0.2")
    assert made["headroom"] == as_json(asdict(headroom))
    assert TOY in made["notes"][-1]
    assert "with a margin of 20%" in words(*long, "--margin", "0.2")


def test_the_example_of_the_defaults_is_a_good_one():
    made = read("--margin", "0.1")
    assert made["learned"]["diverged_at_step"] is None
    assert made["headroom"]["max_staleness"] >= made["settings"]["max_staleness"]
    assert 0 < made["rollouts"]["discarded_share"] < 0.25
    assert min(made["samplers"]["busy"], made["trainers"]["busy"]) > 0.75
