"""Every shipped recipe: it says what it is, it loads, it builds, it trains, it can be ablated."""

import re

import lightning as L
import pytest
import torch

from lightning_qrl.build import build
from lightning_qrl.launch import rehearse
from lightning_qrl.recipe import find_recipe, load_recipe, recipe_from_yaml, recipe_names

each_recipe = pytest.mark.parametrize("name", recipe_names())
COMMON = ["policy.init=random", "trainer.accelerator=cpu", "trainer.max_steps=2"]
GRPO = ["grpo.prompts_per_rollout=2", "grpo.group_size=4"]
LINEARS = {"embedded": 8 * 7 + 1, "embedded-moe": 8 * (4 + 2 + 3 + 1) + 1}  # fused experts: 2
SUPERVISED = ["supervised.batch_size=8", "supervised.blunt_steps=1"]
ABLATIONS = [(n, key) for n in recipe_names() for key in load_recipe(n).values["callbacks"]]


def header(name):
    """The comment that a recipe begins with, as one line."""
    lines = find_recipe(name).read_text().splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment)


def train_shrunk(name, folder, without=()):
    """Two steps of a recipe with a few completions, by a Trainer such as `launch` makes."""
    given = load_recipe(name, without=without).values
    overrides = [*COMMON, *(GRPO if "grpo" in given else SUPERVISED)]
    if "held_out_evaluation" in given["callbacks"]:
        overrides.append("callbacks.held_out_evaluation.prompts=2")
    run = build(load_recipe(name, overrides, without))
    L.seed_everything(given["seed"], verbose=False)
    trainer = L.Trainer(
        **run.trainer_args,
        callbacks=list(run.callbacks.values()),
        logger=False,
        enable_checkpointing="checkpoint" in run.callbacks,
        default_root_dir=folder,
    )
    trainer.fit(run.module, run.data)
    assert trainer.global_step == 2
    assert run.module.plan.table() == rehearse(run).table()
    return run


def test_the_recipes_that_are_promised_are_there():
    promised = {"4bitter", "base", "bf16", "fp8", "mxfp8", "nvfp4_naive", "warmup"}
    assert promised <= set(recipe_names())


@each_recipe
def test_the_header_says_what_it_is_for(name):
    text = header(name)
    marks = ["Purpose:", "Expected:", "Hardware:", "Command:"]
    assert [mark for mark in marks if mark not in text] == []
    purpose, expected, hardware, command = (
        re.search(rf"{mark}\s*(.*?)\s*({'|'.join(marks)}|$)", text)[1] for mark in marks
    )
    assert len(purpose) > 20
    assert re.search(r"\d", expected), "give the result as measured"
    assert "EXPECTED_" not in expected, "the placeholder is still there"
    assert len(hardware) > 5
    assert f"qrl fit --recipe {name}.yaml" in command


@each_recipe
def test_the_headers_command_runs_this_recipe(name):
    command = re.search(r"qrl fit --recipe (\S+)((?: [\w.]+=\S+)*)", header(name))
    assert command is not None
    recipe = load_recipe(command[1], command[2].split())
    assert recipe.name == name
    build(recipe)


@each_recipe
def test_it_builds_and_rehearses(name):
    run = build(load_recipe(name))
    plan = rehearse(run)
    linears = LINEARS[run.module.policy.name]
    assert len(plan.table()) == linears
    assert plan.count_quantized() + plan.count_kept() == linears
    assert list(run.callbacks) == list(load_recipe(name).values["callbacks"])


@each_recipe
def test_resolved_it_is_a_recipe_again(name):
    recipe = load_recipe(name)
    again = recipe_from_yaml(recipe.to_yaml(), name)
    assert again.values == recipe.values
    build(recipe_from_yaml(recipe.to_yaml(), name))


@each_recipe
def test_it_trains_two_steps(name, tmp_path):
    run = train_shrunk(name, tmp_path)
    assert all(p.isfinite().all() for p in run.module.model.parameters())
    assert list(run.module.evaluations) == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), ABLATIONS)
def test_it_trains_without_any_one_callback(name, key, tmp_path):
    run = train_shrunk(name, tmp_path, without=[key])
    assert key not in run.callbacks
    assert all(p.isfinite().all() for p in run.module.model.parameters())


@each_recipe
def test_its_weights_are_the_same_objects_whatever_the_stack(name):
    """A checkpoint of any recipe fits any other: names and shapes do not depend on it."""
    run = build(load_recipe(name))
    plain = {n: p.shape for n, p in run.module.policy.skeleton().named_parameters()}
    run.module.configure_model()
    assert {n: p.shape for n, p in run.module.model.named_parameters()} == plain
    assert all(p.dtype == torch.float32 for p in run.module.model.parameters())


def test_4bitter_moe_quantizes_the_routed_experts_alone():
    run = build(load_recipe("4bitter_moe", ["policy.init=random"]))
    rows = {row.layer: row for row in rehearse(run).table()}
    routed = {name for name in rows if ".mlp.experts." in name}
    tail = {name for name in routed if name.startswith("model.layers.7.")}
    assert (len(routed), len(tail)) == (2 * 8, 2)
    assert {name for name, row in rows.items() if row.quantized} == routed - tail
    assert {name for name, row in rows.items() if not row.weight_decay} == routed - tail
    assert all("bf16_tail" in rows[name].kept_by for name in tail)
    plain = {name for name, row in rows.items() if row.train is row.rollout is None}
    assert plain == {"lm_head", *(f"model.layers.{i}.mlp.shared_expert_gate" for i in range(8))}
