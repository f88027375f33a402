"""From recipes to settings of the reference model: what is taken, asked for, or said."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from lightning_qrl.asynchrony.schedule import Schedule
from lightning_qrl.cli import app
from lightning_qrl.cli.simulating.recipe_cluster import recipe_cluster
from lightning_qrl.errors import UserError
from lightning_qrl.launch.simulated import read_recipe
from lightning_qrl.recipe import recipe_names
from lightning_qrl.simulator.closed_forms import critical_staleness
from lightning_qrl.simulator.cluster import Cluster, run
from lightning_qrl.simulator.cluster.asynchrony import TOKENS
from lightning_qrl.simulator.dynamics import floor
from lightning_qrl.simulator.settings import PRESETS, Settings

DQ, HP = "dequantized", "high_precision"
NOTHING = {"bf16_tail": False, "shared_experts": False, "four_over_six": False, "max_staleness": 0}
FOUR = {"precision": "fp4", "backward": DQ, "bf16_tail": True, "four_over_six": True}
SHIPPED = {  # settings, settings that do not follow
    "4bitter": ({**FOUR, "shared_experts": False, "max_staleness": 0}, set()),
    "4bitter_async": ({**FOUR, "shared_experts": False, "max_staleness": 8}, set()),
    "4bitter_moe": ({**FOUR, "shared_experts": True, "max_staleness": 0}, set()),
    "base": ({"precision": "bf16", "max_staleness": 0}, set()),
    "bf16": ({"precision": "bf16", "max_staleness": 0}, set()),
    "fp16": ({"precision": "bf16", "max_staleness": 0}, set()),
    "fp8": ({**NOTHING, "precision": "fp8", "backward": DQ}, set()),
    "fp8_block": ({**NOTHING, "precision": "fp8"}, {"backward"}),
    "int4_w4a16": ({**NOTHING, "backward": DQ}, {"precision"}),
    "mxfp8": ({**NOTHING, "precision": "fp8", "backward": DQ}, set()),
    "nvfp4_naive": ({**NOTHING, "precision": "fp4", "backward": HP}, set()),
    "nvfp4_pretraining": ({**NOTHING, "precision": "fp4", "bf16_tail": True}, {"backward"}),
    "nvfp4_w4a16": ({**NOTHING, "backward": DQ}, {"precision"}),
}
REFUSED = {"warmup", "warmup_moe"}
NOTED = {  # a part of a note
    "base": ["it computes in 32-true, which the model does not know: taken as bf16"],
    "fp16": ["it computes in fp16, which the model does not know: taken as bf16"],
    "bf16": [],
    "4bitter_moe": [],
    "4bitter": ["the policy is dense"],
    "fp8": ["the model's fp8 is MXFP8", "the policy is dense", "attention is quantized too"],
    "nvfp4_pretraining": [
        "the policy is dense", "attention is quantized too", "not quantized either: 0;",
    ],
}  # fmt: skip


def test_every_shipped_recipe_is_known():
    assert set(recipe_names()) == {*SHIPPED, *REFUSED}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe(name):
    reading = read_recipe(name)
    values, unknown = SHIPPED[name]
    assert dict(reading.values) == values
    assert set(reading.unknown) == unknown
    Settings(**reading.values)
    if name in NOTED:
        parts = ["not taken over: grpo.prompts_per_rollout=16 and grpo.group_size=", *NOTED[name]]
        assert len(reading.notes) == len(parts)
        assert all(part in note for part, note in zip(parts, reading.notes, strict=True))


def test_the_published_recipe_is_the_preset():
    values = {**read_recipe("4bitter_moe").values}
    del values["max_staleness"]
    assert Settings(**values) == Settings(**PRESETS["fp4_full"])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_without_rollouts_there_is_nothing_to_simulate(name):
    with pytest.raises(UserError, match=f"recipe {name} trains without rollouts"):
        read_recipe(name)


@pytest.fixture
def reading(tmp_path):
    """Reads a recipe that extends a shipped one."""

    def read(text: str, extends: str = "4bitter_moe"):
        file = tmp_path / "mine.yaml"
        file.write_text(f"extends: {extends}\n{text}")
        return read_recipe(str(file))

    return read


UNKNOWN = [
    ("bf16_tail: {fraction: 0.5}", ["bf16_tail"], "the last 4 of its 8 layers"),
    (
        "forward_quantization: {side: rollout}",
        ["precision", "backward"],
        "its trainer and its sampler compute in different formats",
    ),
    (
        "forward_quantization: {activation: {four_over_six: none}}",
        ["four_over_six"],
        "a part of its operands",
    ),
    (
        "sensitive_weights: {select: [attention, '*.shared_expert.down_proj']}",
        ["shared_experts"],
        "a part of its shared experts is quantized",
    ),
    (
        "dequantized_backward: {where: '*.gate_up_proj'}",
        ["backward"],
        "its backward is dequantized and high_precision",
    ),
]


@pytest.mark.parametrize(("callbacks", "keys", "says"), UNKNOWN)
def test_what_the_model_does_not_know_has_to_be_given(reading, callbacks, keys, says):
    found = reading(f"callbacks: {{{callbacks}}}")
    assert list(found.unknown) == keys
    with pytest.raises(UserError, match=f"recipe mine: {says}.*give the {' and the '.join(keys)}"):
        found.with_given({})
    values = {"precision": "fp4", "backward": DQ, "bf16_tail": True, "shared_experts": True,
              "four_over_six": True}  # fmt: skip
    settings = Settings(**found.with_given({key: values[key] for key in keys}))
    assert settings == Settings(**PRESETS["fp4_full"], max_staleness=0)
    assert found.with_given({}, keys) == dict(found.values)  # a sweep will set them


def test_another_format_of_four_bits_is_not_taken_for_this_one(reading):
    found = reading(
        "callbacks: {forward_quantization: {format: mxfp4}, dequantized_backward: {}}", "base"
    )
    assert found.unknown == {"precision": "it computes in mxfp4"}


NOTES = [
    (
        "rollout: {max_staleness: 1, completion_time: 2, in_flight_update: true}",
        "not taken over: rollout.in_flight_update=true, rollout.completion_time=2; qrl simulate "
        "--cluster --recipe ",
    ),
    (
        "rollout: {temperature: 0.5, max_staleness: 3, weight_sync_every: 3, queue_depth: 1}",
        "rollout.queue_depth=1, rollout.weight_sync_every=3, rollout.temperature=0.5; qrl simulate",
    ),
    ("rollout: {top_p: 0.9}", "not taken over: rollout.top_p=0.9"),
    (
        "rollout: {max_staleness: 3}",
        "the recipe's lag is 3 versions, for every rollout from step 3",
    ),
    ("grpo: {minibatches: 2}", "it takes 2 optimizer steps on one rollout"),
    ("callbacks: {truncated_importance_sampling: {cap: 2.0}}", "truncated_importance_sampling"),
    ("callbacks: {sensitive_weights: {select: shared_experts}}", "attention is quantized too"),
]


@pytest.mark.parametrize(("text", "says"), NOTES)
def test_what_the_model_leaves_out_is_said(reading, text, says):
    notes = reading(text).notes
    (note,) = (note for note in notes if "grpo.prompts_per_rollout=16" not in note)
    assert says in note


@pytest.mark.parametrize(
    ("text", "lag"),
    [
        ("rollout: {max_staleness: 0}", None),
        ("rollout: {max_staleness: 8}", 8),
        ("rollout: {max_staleness: 4}\ngrpo: {minibatches: 2}", 4),
        ("rollout: {max_staleness: 3, weight_sync_every: 2, queue_depth: 2}", None),
        ("rollout: {max_staleness: 1, completion_time: 2, completion_time_spread: 0.8}", None),
    ],
)
def test_the_lag_is_that_of_the_trainers_schedule(reading, text, lag):
    rollouts = reading(text).rollouts
    assert rollouts.lag == lag
    if rollouts.asynchrony.max_staleness:
        ages = {
            phase.number * rollouts.updates - group.spans[0].version
            for phase in phases(rollouts, 40)[10:]
            for group in phase.groups
        }
        assert (ages == {lag}) == (lag is not None)


def phases(rollouts, count):
    """Of the trainer."""
    schedule = Schedule(
        rollouts.asynchrony, groups=rollouts.groups, updates=rollouts.updates, tokens=TOKENS,
        samplers=rollouts.asynchrony.samplers or rollouts.groups, seed=0,
    )  # fmt: skip
    return [schedule.next_phase() for _ in range(count)]


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {max_staleness: 8}",
        "rollout: {max_staleness: 3, weight_sync_every: 3, queue_depth: 1}",
        "rollout: {max_staleness: 2, completion_time: 1.5, queue_depth: 3, samplers: 24}\n"
        "grpo: {minibatches: 2, prompts_per_rollout: 8}",
    ],
)
def test_a_cluster_does_what_the_recipes_trainer_does(reading, tmp_path, text):
    found = reading(text)
    values, notes = recipe_cluster(str(tmp_path / "mine.yaml"))
    outcome = run(Cluster.from_mapping(values))
    assert outcome.steps == 80
    for seen, phase in zip(
        outcome.phases, phases(found.rollouts, len(outcome.phases)), strict=True
    ):
        begun_with = phase.number * found.rollouts.updates
        ages = Counter(begun_with - group.spans[0].version for group in phase.groups)
        assert seen.ages == tuple(sorted(ages.items()))
        assert (seen.waiting, seen.discarded) == (phase.waiting, phase.discarded)
    assert values["floor"] == floor(Settings(**PRESETS["fp4_full"]))
    assert "optimizer step" in notes[0]
    derived = found.rollouts.lag is not None
    assert [note.split()[0] for note in notes[1:]] == ["queue_depth=8"] * derived


def test_a_synchronous_recipe_is_a_cluster_too(reading, tmp_path):
    reading("trainer: {max_steps: 7}", "nvfp4_w4a16")
    values, (_, note) = recipe_cluster(str(tmp_path / "mine.yaml"))
    outcome = run(Cluster.from_mapping(values))
    assert (outcome.steps, outcome.staleness.largest, outcome.rollouts.discarded) == (7, 0, 0)
    assert (outcome.seconds, outcome.gpu_hours) == (7, 0)
    assert note.startswith("the floor is BF16's, as its weights are in nvfp4")


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def printed(*arguments):
        done = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    text = " ".join(printed("--recipe", "4bitter_async", "max_staleness=2").split())
    assert text.startswith("recipe 4bitter_async: nvfp4 forward on 21 of 57 linears")
    assert "note the policy is dense" in text
    made = json.loads(printed("-r", "4bitter_async", "batch=8", "--format", "json"))
    assert made["settings"]["max_staleness"] == 8
    assert made["settings"]["batch"] == 8
    *static, of_lag = made["notes"]
    assert static == list(read_recipe("4bitter_async").notes)
    critical = critical_staleness(floor(Settings(**made["settings"])))
    assert f"8 the drift has no fixed point (critical lag {critical:.1f})" in of_lag
    assert "note the model's cap" not in text  # of 8, where another is given

    cluster = json.loads(printed("--cluster", "-r", "4bitter_async", "--format", "json", "steps=9"))
    assert (cluster["steps"], cluster["seconds"]) == (9, 9)
    assert cluster["staleness"]["largest"] == 8

    both = json.loads(printed("--compare", "fp4_full", "4bitter_moe", "--format", "json"))
    assert both["A"]["settings"] == {**both["B"]["settings"], "max_staleness": 2}
    assert "A and B are the same" in printed(
        "--compare", "fp4_full", "4bitter_moe", "max_staleness=4"
    )

    axes = ["--sweep", "backward=dequantized,high_precision"]
    points = json.loads(printed("-r", "fp8_block", *axes, "--format", "json"))["points"]
    assert [point["settings"]["backward"] for point in points] == [DQ, HP]
    with pytest.raises(UserError, match="recipe fp8_block: its backward is quantized, which"):
        printed("-r", "fp8_block")
