"""`qrl simulate` refuses what it cannot do: one line, exit code 2, nothing written."""

import sys

import pytest
from refusals import refusal


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Runs `qrl simulate` with arguments that it must refuse; gives the line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("{}")
    (tmp_path / "pools.yaml").write_text("samplers: [{slots: 3}]\n")
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe")

    return refusal(tmp_path, monkeypatch, capfd, "simulate")


SETTINGS = [
    ("prcision=fp4", "command line: prcision: no such setting; did you mean precision"),
    ("precision=fp5", "precision is bf16 or fp8 or fp4, got fp5"),
    ("precision=", "precision is bf16 or fp8 or fp4, got null"),
    ("precision.x=1", "precision is bf16 or fp8 or fp4, got {'x': 1}"),
    ("batch=0", "batch must be at least 1 and at most 1024, got 0"),
    ("samplers=0", "samplers must be at least 1"),
    ("max_staleness=-1", "max_staleness must be at least 0"),
    ("batch=4.0", "batch is a whole number, got 4.0"),
    ("batch=true", "batch is a whole number, got true"),
    ("four_over_six=1", "four_over_six is true or false, got 1"),
    ("plan=4bitter", "command line: plan: no such setting"),
    ("batch", "'batch' is no override"),
    ("batch=!!python/none x", "command line: batch: "),
]


@pytest.mark.parametrize(("given", "says"), SETTINGS)
def test_a_setting(refused, given, says):
    assert says in refused(given)


TOGETHER = [
    (["--save", "a.json"], "--save does nothing without --calibrate; take it out"),
    (["--margin", "0.1"], "--margin does nothing without --cluster; take it out"),
    (["--settings", "a.yaml"], "--settings does nothing without --cluster; take it out"),
    (["--page", "--sweep", "batch=1..2"], "--sweep does nothing with --page; take it out"),
    (["--page", "--format", "json"], "--format does nothing with --page; take it out"),
    (["--page", "--compare", "bf16", "bf16"], "--compare does nothing with --page; take it out"),
    (["--cluster", "--preset", "bf16"], "--preset does nothing with --cluster; take it out"),
    (["--cluster", "--recipe", "bf16", "--settings", "a.yaml"], "give one of them"),
    (["--cluster", "--recipe", "bf16", "--calibration", "text.json"], "give one of them"),
    (["--page", "--seeds", "9"], "--seeds does nothing with --page; take it out"),
    (["--compare", "bf16", "bf16", "--seeds", "9"], "--seeds does nothing with --compare"),
    (["--cluster", "--seeds", "9"], "--seeds does nothing with --cluster; take it out"),
    (["--seeds", "9", "--sweep", "seed=0..3"], "--seeds and --sweep seed both say which seeds"),
    (["--page", "a.html", "--page", "b.html"], "--page is given twice; take one of them out"),
    (["--preset=bf16", "--preset", "fp4_dq"], "--preset is given twice; take one of them out"),
    (["-r", "bf16", "--recipe", "base"], "--recipe is given twice; take one of them out"),
    (["--cluster", "--page"], "--page does nothing with --cluster; take it out"),
    (["--calibrate", "x", "batch=2"], "KEY=VALUE does nothing with --calibrate; take it out"),
    (["--compare", "bf16", "bf16", "--preset", "bf16"], "--preset does nothing with --compare"),
    (["--compare", "bf16", "bf16", "--sweep", "batch=1..2"], "--sweep does nothing with --compare"),
    (["--preset", "bf16", "--recipe", "bf16"], "give one of them"),
    (
        ["--cluster", "--margin", "0.1", "--sweep", "batch=1,2"],
        "--margin does nothing with --sweep",
    ),
    (["batch=2", "batch=3"], "command line: batch is given twice"),
    (["batch=2", "--sweep", "batch=1..3"], "--sweep batch: batch=2 says it too"),
    (["--compare", "bf16", "batch=2", "batch=4"], "batch is given for both sides too"),
]


@pytest.mark.parametrize(("arguments", "says"), TOGETHER, ids=lambda value: " ".join(value)[:40])
def test_what_does_nothing_together(refused, arguments, says):
    assert says in refused(*arguments)


VALUES = [
    (["--preset", "fp4_ful"], "--preset fp4_ful: no such preset; did you mean fp4_full"),
    (["--recipe", "4biter"], "recipe 4biter not found; did you mean 4bitter"),
    (["--compare", "fp4_ful", "bf16"], "--compare fp4_ful: neither a preset, nor a recipe"),
    (["--compare", "prec=fp4", "bf16"], "--compare prec=fp4: prec: no such setting"),
    (["--compare", "precision=fp5", "bf16"], "precision is bf16 or fp8 or fp4, got fp5"),
    (["--compare", "precision=[fp4", "bf16"], "a bracket or a quote is not closed"),
    (["--page", "x.txt"], "--page x.txt: its name must end in .html"),
    (["--page", "no/x.html"], "--page no/x.html cannot be written: there is no folder no"),
    (["--sweep", "batch"], "--sweep batch: write key=a..b or key=v1,v2"),
    (["--sweep", "=1..2"], "--sweep =1..2: write key=a..b"),
    (["--sweep", "bach=1..2"], "bach: no such setting; did you mean batch"),
    (["--sweep", "batch=3..1"], "--sweep batch=3..1: it ends before it begins"),
    *(
        (["--sweep", text], f"--sweep {text}: a..b takes two whole numbers; list other values")
        for text in (
            "horizon=short..long",
            "batch=1.5..2",
            "batch=4..8..12",
            "batch=4..",
            "batch=..4",
        )
    ),
    (["--seeds", "1"], "--seeds must be at least 2, got 1"),
    (["--seeds", "5001", "--sweep", "batch=1,2"], "--seeds 5001: more than 10000 runs in all"),
    (["--seeds", "2", "seed=2147483647"], "seed must be at least 0 and at most 2147483647"),
    (["--sweep", "batch=1,1"], "--sweep batch: 1 is given twice"),
    (["--sweep", "batch=0..3"], "batch must be at least 1"),
    (["--sweep", "batch=1..2", "--sweep", "batch=1..3"], "--sweep batch is given twice"),
    (["--sweep", "seed=0..99999"], "--sweep seed: more than 10000 runs in all"),
    (["--sweep", "seed=0..999", "--sweep", "batch=1..11"], "more than 10000 runs in all"),
    (
        ["--sweep", "batch=1..2", "--sweep", "seed=0..1", "--sweep", "samplers=1,2"],
        "--sweep takes one or two settings, got batch, seed, samplers; fix the others",
    ),
    (["--cluster", "slots=3"], "slots is unknown"),
    (["--cluster", "samplers.slot=3"], "samplers.slot is unknown; did you mean samplers.slots"),
    (["--cluster", "samplers.slots=0"], "samplers.slots must be at least 1"),
    (["--cluster", "trainers.overhead=-1"], "trainers.overhead must be at least 0"),
    (["--cluster", "--sweep", "bach=1,2"], "bach is unknown; did you mean batch"),
    (["--cluster", "--settings", "no.yaml"], "no.yaml cannot be read: No such file"),
    (
        ["--cluster", "--settings", "pools.yaml", "samplers.slots=4"],
        "pools.yaml has a list of pool",
    ),
    (["--cluster", "--margin", "-1"], "--margin must be at least 0, got -1.0"),
    (["--cluster", "--margin", "nan"], "--margin must be at least 0, got nan"),
    (["--cluster", "--margin", "0.1", "duration=60"], "too short to judge max_staleness"),
    (["--calibration", "no.json", "plan=x"], "--calibration no.json cannot be read: No such file"),
    (["--calibration", "latin.json", "plan=x"], "latin.json cannot be read: it is no text"),
    (["--calibration", "text.json", "plan=x"], "--calibration text.json: "),
    (["--cluster", "--calibration", "text.json"], "--calibration text.json: "),
    (["--calibrate", "x", "--save", "x.txt"], "--save x.txt: its name must end in .json"),
    (["--calibrate", "x", "--save", "no/x.json"], "there is no folder no"),
]


@pytest.mark.parametrize(("arguments", "says"), VALUES, ids=lambda value: " ".join(value)[:40])
def test_a_value(refused, arguments, says):
    assert says in refused(*arguments)


EARLY = [
    (["--recipe", "broken.yaml"], "broken.yaml: not readable as YAML"),
    (["--recipe", "empty.yaml"], "recipe empty.yaml has no section grpo"),
    (["--recipe", "orphan.yaml"], "orphan.yaml: extends: recipe nowhere not found"),
    (["--recipe", "warmup"], "recipe warmup trains without rollouts"),
    (["--recipe", "4bitter", "batch=0"], "batch must be at least 1"),
    (["--recipe", "4bitter", "--sweep", "batch=0..3"], "batch must be at least 1"),
    (["--compare", "4bitter", "precision=fp5"], "precision is bf16 or fp8 or fp4, got fp5"),
    (["--compare", "4bitter", "nothing"], "--compare nothing: neither a preset, nor a recipe"),
    (["--compare", "4bitter", "empty.yaml"], "recipe empty.yaml has no section grpo"),
    (["--cluster", "--recipe", "empty.yaml"], "recipe empty.yaml has no section grpo"),
]


@pytest.mark.parametrize(("arguments", "says"), EARLY, ids=lambda value: " ".join(value)[:40])
def test_it_is_said_before_a_recipe_is_built(refused, tmp_path, monkeypatch, arguments, says):
    (tmp_path / "broken.yaml").write_text("extends: [base\n")
    (tmp_path / "empty.yaml").write_text("seed: 1\n")
    (tmp_path / "orphan.yaml").write_text("extends: nowhere\n")
    building = "lightning_qrl.launch.simulated"
    monkeypatch.delitem(sys.modules, building, raising=False)
    assert says in refused(*arguments)
    assert building not in sys.modules
