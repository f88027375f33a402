"""From recipes to objects: what builds, what is refused, and that nothing else ever happens."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from callbacks.bf16_tail import BF16Tail
from lightning_qrl.build import build
from lightning_qrl.data import RolloutData
from lightning_qrl.errors import UserError
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.launch import rehearse
from lightning_qrl.recipe import Recipe, load_recipe, recipe_from_yaml, recipe_names
from lightning_qrl.supervised import Demonstrations, SupervisedModule

RANDOM = "policy.init=random"


def failure(*overrides: str, recipe: str = "4bitter") -> str:
    with pytest.raises(UserError) as caught:
        rehearse(build(load_recipe(recipe, [RANDOM, *overrides])))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_grpo_recipe_becomes_what_it_says():
    overrides = ["seed=7", "grpo.group_size=4", "grpo.minibatches=2", "optimizer.lr=0.5"]
    run = build(load_recipe("4bitter", overrides))
    assert isinstance(run.module, GRPOModule)
    assert isinstance(run.data, RolloutData)
    assert (run.module.seed, run.data.seed, run.module.group_size) == (7, 7, 4)
    assert (run.data.minibatches, run.module.optimizer_settings.lr) == (2, 0.5)
    assert isinstance(run.callbacks["bf16_tail"], BF16Tail)
    assert isinstance(run.callbacks["checkpoint"], ModelCheckpoint)
    assert run.trainer_args["use_distributed_sampler"] is False
    assert run.trainer_args["log_every_n_steps"] == 1


def test_a_supervised_recipe_becomes_what_it_says():
    run = build(load_recipe("warmup", ["supervised.batch_size=8"]))
    assert isinstance(run.module, SupervisedModule)
    assert isinstance(run.data, Demonstrations)
    assert run.data.batch_size == 8


def test_a_callback_of_another_package_and_a_second_one_of_ours():
    overrides = [
        "callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: x}",
        "callbacks.wider_tail={_target_: callbacks.bf16_tail.BF16Tail, fraction: 0.5}",
    ]
    run = build(load_recipe("4bitter", overrides))
    assert isinstance(run.callbacks["early"], EarlyStopping)
    assert run.callbacks["early"].monitor == "x"
    kept = {row.kept_by for row in rehearse(run).table()}
    assert any("wider_tail" in names for names in kept)


ONCE = {
    "score_centering": "score_centering.ScoreCentering",
    "vcpo": "vcpo.VCPO",
    "adaptive_quantization_noise": "adaptive_quantization_noise.AdaptiveQuantizationNoise",
    "fp16": "fp16.FP16",
    "router_replay": "router_replay.RouterReplay",
}


@pytest.mark.parametrize("key", ONCE)
def test_a_second_one_that_would_undo_or_double_the_first_is_refused(key):
    second = f"callbacks.twin._target_=callbacks.{ONCE[key]}"
    message = failure(f"callbacks.{key}={{}}", second, recipe="base")
    assert f"callbacks.twin: callbacks.{key} is one too" in message


def test_a_second_one_that_adds_to_the_first_is_built():
    second = "{_target_: callbacks.rejection_sampling.RejectionSampling, level: geometric}"
    given = ["callbacks.rejection_sampling={}", f"callbacks.more={second}"]
    assert {"rejection_sampling", "more"} <= build(load_recipe("base", given)).callbacks.keys()


def test_a_callback_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "qrl_test_callback.py").write_text(
        "import lightning as L\nclass Mine(L.Callback):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    run = build(load_recipe("base", ["callbacks.mine._target_=qrl_test_callback.Mine"]))
    assert type(run.callbacks["mine"]).__name__ == "Mine"


UNKNOWN_KEYS = [
    "policy.nmae=x", "task.dificulty=1", "grpo.groupsize=4", "rollout.temprature=1",
    "optimizer.learning_rate=1", "trainer.max_stepps=1", "callbacks.bf16_tail.frac=0.1",
    "callbacks.bf16_tial={}", "callbacks.forward_quantization.outer_scael=row",
    "callbacks.forward_quantization.weight.outer_scael=row", "callbacks.checkpoint.filenam=x",
    "callbacks.live_view.every=1", "callbacks.held_out_evaluation.prompt=1",
    "grpo.seed=1", "trainer.callbacks=[]",
    "trainer.log_every_n_steps=5", "grpo.prompts=[]",
]  # fmt: skip
WRONG_TYPES = [
    "policy.name=5", "policy.name=null", "policy.init=maybe", "policy.save_dtype=int8",
    "task.name=5", "task.difficulty=two", "task.difficulty=true", "task.difficulty=1.5",
    "task.reward_scale=3", "rollout.engine=null", "rollout.temperature=hot",
    "rollout.temperature=true", "rollout.max_new_tokens=8.0", "grpo.group_size='4'",
    "grpo.group_size=4.0", "grpo.group_size=true", "grpo.group_size=null", "grpo.clip_low=[0.2]",
    "grpo.loss=5", "grpo.minibatches=[1]", "optimizer.lr=fast", "optimizer.lr=null",
    "optimizer.betas=0.9", "optimizer.betas=[a,b]", "optimizer.betas=[0.9]",
    "optimizer.schedule=1", "optimizer.schedule_args=[1]", "optimizer.warmup_steps=0.5",
    "trainer.max_steps=many", "trainer.max_steps=null", "trainer.max_steps=1.5",
    "trainer.max_steps=true", "trainer.devices={a: 1}", "trainer.precision=nonsense",
    "trainer.precision=[32]", "trainer.gradient_clip_val=big", "trainer.accumulate_grad_batches=x",
    "callbacks.bf16_tail=5", "callbacks.bf16_tail=[1]", "callbacks.bf16_tail.fraction=half",
    "callbacks.bf16_tail.fraction=null", "callbacks.bf16_tail.fraction={a: 1}",
    "callbacks.sensitive_weights.select=5", "callbacks.sensitive_weights.select=[1]",
    "callbacks.forward_quantization.format=4", "callbacks.forward_quantization.format=[nvfp4]",
    "callbacks.forward_quantization.weight=row", "callbacks.forward_quantization.weight=[row]",
    "callbacks.forward_quantization.weight.outer_scale=5",
    "callbacks.forward_quantization.weight.format=[fp8_e4m3]",
    "callbacks.forward_quantization.outer_scale=5", "callbacks.forward_quantization.side=left",
    "callbacks.forward_quantization.four_over_six=true", "callbacks.live_view.every_n_steps=x",
]  # fmt: skip
OUT_OF_RANGE = [
    ("grpo.group_size=1", "group_size must be at least 2"),
    ("rollout.max_staleness=-1", "max_staleness must be"),
    ("callbacks.bf16_tail.fraction=1.5", "fraction must be 0 to 1"),
    ("callbacks.bf16_tail.fraction=-0.1", "fraction must be 0 to 1"),
    ("callbacks.bf16_tail.fraction=.nan", "fraction must be 0 to 1"),
    ("callbacks.forward_quantization.format=nvfp5", "unknown number format 'nvfp5'"),
    ("callbacks.forward_quantization.outer_scale=column", "outer_scale"),
    ("callbacks.sensitive_weights.select=[nothing.*]", "matches no linear layer"),
    ("callbacks.sensitive_weights.select=[]", "select names no layer"),
    ("callbacks.forward_quantization.where=lm_hed", "matches no linear layer"),
    ("callbacks.quantized_backward.format=nvfp4", "dequantized_backward and quantized_backward"),
    ("optimizer.schedule=cosinus", "optimizer: "),
    ("optimizer={schedule: cosine_with_min_lr, schedule_args: {}}", "optimizer: "),
    ("optimizer={schedule: cosine, schedule_args: {nothing: 1}}", "optimizer: "),
    ("optimizer.lr=-1", "lr must be above 0"),
    ("optimizer.lr=.inf", "lr must be above 0 and finite"),
    ("optimizer.eps=.nan", "eps must be above 0"),
    ("rollout.temperature=.inf", "temperature must be above 0, from 1e-06 to 1e+06"),
    ("trainer.gradient_clip_val=-1", "expected a finite number from 0"),
    ("trainer.gradient_clip_val=.nan", "expected a finite number from 0"),
    ("trainer.fast_dev_run=true", "no such key"),
    ("trainer.limit_train_batches=1", "no such key"),
    ("trainer.val_check_interval=1", "no such key"),
    ("grpo.prompts_per_rollout=0", "prompts_per_rollout must be at least 1"),
    ("grpo.prompts_per_rollout=100000", "the task has only"),
    ("grpo.minibatches=3", "do not divide"),
    ("trainer.accumulate_grad_batches=3", "do not divide"),
    ("trainer.accumulate_grad_batches=0", "expected at least 1"),
    ("trainer.accumulate_grad_batches=-1", "expected at least 1"),
    ("trainer.max_steps=0", "give the number of optimizer steps"),
    ("trainer.max_steps=-1", "give the number of optimizer steps"),
    ("grpo.loss=nothing", "'nothing' is not in losses"),
    ("task.name=arithmetics", "did you mean arithmetic?"),
    ("rollout.engine=embeded", "did you mean embedded?"),
    ("callbacks.x._target_=no.such.Thing", "cannot import 'no.such.Thing'"),
    ("callbacks.x._target_=json.dumps", "is of Python's own library"),
    ("callbacks.x._target_=lightning.Trainer", "is no Lightning callback"),
    ("callbacks.x._target_=5", "cannot import"),
    ("callbacks.x._target_=..a.B", "cannot import"),
    ("callbacks.x._target_=", "an outside one needs _target_: package.Class"),
    ("callbacks.base={}", "no such callback"),
    ("callbacks.checkpoint.every_n_epochs=-5", "callbacks.checkpoint"),
    ("callbacks.held_out_evaluation.prompts=0", "must be at least 1"),
    ("supervised={batch_size: 2}", "give one of the sections grpo and supervised"),
    ("policy.name=/nowhere", "there is no such folder"),
    ("policy.name=missing.gguf", "there is no such file"),
]


@pytest.mark.parametrize("override", UNKNOWN_KEYS)
def test_a_key_that_does_not_exist_is_named(override):
    path = override.partition("=")[0].split(".")
    message = failure(override)
    assert message.startswith(f"command line: {'.'.join(path[:2])}")
    assert path[-1] in message


@pytest.mark.parametrize("override", WRONG_TYPES)
def test_a_wrong_type_is_named(override):
    assert failure(override).startswith(f"command line: {override.partition('.')[0]}")


@pytest.mark.parametrize(("override", "says"), OUT_OF_RANGE)
def test_a_value_out_of_range_says_what_is_right(override, says):
    assert says in failure(override)


def test_neither_of_the_two_methods(tmp_path):
    file = tmp_path / "none.yaml"
    file.write_text(
        "policy: {init: random}\ntask: {name: arithmetic}\nrollout: {engine: embedded}\n"
        "trainer: {max_steps: 1}\n"
    )
    assert "give one of the sections grpo and supervised" in failure(recipe=str(file))


def test_a_policy_folder_without_weights_or_config(tmp_path, tiny_policy):
    assert "has no config.json" in failure(f"policy.name={tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    message = failure(f"policy.name={tmp_path}", "policy.init=pretrained")
    assert "has no weights" in message


def mutations(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Every key at every depth: renamed, dropped, and with values of other types."""
    for key, value in values.items():
        here = (*path, key)
        yield "rename", here, None
        yield "drop", here, None
        for other in (None, True, -1, 0, 1.5, "x", [], ["x"], {}, {"x": 1}, 10**9):
            if type(other) is not type(value) or other != value:
                yield "set", here, other
        if isinstance(value, dict):
            yield from mutations(value, here)


def mutated(recipe: Recipe, what: str, path: tuple[str, ...], other: Any) -> Recipe:
    values = copy.deepcopy(recipe.values)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    old = inner.pop(path[-1])
    if what == "rename":
        inner[f"{path[-1]}x"] = old
    elif what == "set":
        inner[path[-1]] = other
    return Recipe(recipe.name, values, (("mutant.yaml", values),))


def check_mutants(name: str, every: int, but: str | None = None) -> tuple[int, int]:
    """Counts of mutants that build and that are refused; what ``but`` has too is skipped."""
    recipe = load_recipe(name, [RANDOM])
    known = {} if but is None else load_recipe(but, [RANDOM]).values
    built = refused = 0
    for what, path, other in list(mutations(recipe.values))[::every]:
        if same_in(known, recipe.values, path):
            continue
        text = mutated(recipe, what, path, other).to_yaml()
        try:
            rehearse(build(recipe_from_yaml(text, name)))
            built += 1
        except UserError as error:
            refused += "\n" not in str(error)
        except Exception as error:
            raise AssertionError(f"{name}: {what} {'.'.join(path)} {other!r}: {error!r}") from error
    return built, refused


def same_in(known: dict[str, Any], values: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Whether both have the same at a path."""
    for key in path:
        if key not in known:
            return False
        known, values = known[key], values[key]
    return known == values


def test_a_mutant_of_the_full_recipe_builds_or_is_refused_in_one_line():
    built, refused = check_mutants("4bitter", every=7)
    assert built > 3
    assert refused > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names())
def test_every_mutant_of_every_recipe_builds_or_is_refused_in_one_line(name):
    built, refused = check_mutants(name, every=1, but=None if name == "base" else "base")
    assert refused > 0
    assert built + refused > (300 if name in ("base", "warmup") else 5)
