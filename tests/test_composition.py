"""Callbacks compose: their order is irrelevant, and each can be left out.

What `--without KEY` changes in the plan is what that callback is for, and nothing else: that is
what makes leaving it out an ablation.
"""

import itertools
from dataclasses import replace

import lightning as L
import pytest

from callbacks.base import PrecisionCallback
from lightning_qrl.build import build
from lightning_qrl.launch import rehearse
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.recipe import load_recipe, recipe_names
from lightning_qrl.tasks.arithmetic import Arithmetic

FULL = "4bitter"
PRECISION = [
    "forward_quantization",
    "dequantized_backward",
    "bf16_tail",
    "sensitive_weights",
    "no_decay_on_quantized",
]  # each has a test below
SHRUNK = ["policy.init=random", "trainer.accelerator=cpu", "grpo.prompts_per_rollout=2"]
SHRUNK += ["grpo.group_size=4"]


def plan_of(name, without=()):
    return rehearse(build(load_recipe(name, without=without)))


def rows_of(name, without=()):
    return {row.layer: row for row in plan_of(name, without).table()}


def precision_keys(name):
    made = build(load_recipe(name)).callbacks
    return [key for key, callback in made.items() if isinstance(callback, PrecisionCallback)]


def callback_keys(name):
    return list(load_recipe(name).values["callbacks"])


def changed(without):
    """Layers whose row differs without a callback: full row and row without it, by layer."""
    full, rest = rows_of(FULL), rows_of(FULL, [without])
    assert full.keys() == rest.keys()
    return {layer: (full[layer], rest[layer]) for layer in full if full[layer] != rest[layer]}


def differing_fields(pair):
    full, rest = pair
    return {name for name in full.__slots__ if getattr(full, name) != getattr(rest, name)}


# --- order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipe_names())
def test_any_order_of_callbacks_gives_the_same_plan(name):
    run = build(load_recipe(name))
    declaring = [run.callbacks[key] for key in precision_keys(name)]
    skeleton = run.module.policy.skeleton()
    expected = rehearse(run).table()
    for order in itertools.permutations(declaring):
        plan = PrecisionPlan()
        for callback in order:
            callback.declare(plan)
        plan.commit(skeleton)  # a layer that an earlier plan swapped is a linear layer still
        assert plan.table() == expected


class DigitsTask(Arithmetic):
    """Rewards digits, so that even an untrained policy has completions that differ in reward."""

    def reward(self, prompt, completion):
        return sum(character.isdigit() for character in completion) / 8


@pytest.fixture
def weights_after(tmp_path):
    """Trains the full stack, shrunk, with its callbacks in a given order."""

    def train(order, steps=3):
        run = build(load_recipe(FULL, [*SHRUNK, f"trainer.max_steps={steps}"]))
        run.module.task = DigitsTask()
        L.seed_everything(0, verbose=False)
        callbacks = [run.callbacks[key] for key in order]
        trainer = L.Trainer(
            **run.trainer_args,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(run.module, run.data)
        assert trainer.global_step == steps
        return run.module.model.state_dict()

    return train


def orders():
    """All orders of the four that decide what a layer computes in, the fifth anywhere in them."""
    four = [key for key in PRECISION if key != "no_decay_on_quantized"]
    found = [list(order) for order in itertools.permutations(four)]
    for number, order in enumerate(found):
        order.insert(number % 5, "no_decay_on_quantized")
    return found


def assert_all_alike(weights_after, chosen):
    expected = weights_after(PRECISION)
    for order in chosen:
        weights = weights_after(order)
        assert weights.keys() == expected.keys()
        assert all(weights[name].equal(expected[name]) for name in weights), order


def test_some_orders_give_bitwise_the_same_weights(weights_after):
    assert_all_alike(weights_after, [PRECISION[::-1], *orders()[7::6]])


@pytest.mark.slow
def test_all_orders_give_bitwise_the_same_weights(weights_after):
    assert_all_alike(weights_after, orders())


def test_the_weights_compared_are_trained_ones(weights_after):
    """Three steps change every weight, and one callback less leads elsewhere."""
    after, before = weights_after(PRECISION), weights_after(PRECISION, steps=1)
    assert not any(after[name].equal(before[name]) for name in after)
    for key in PRECISION:
        rest = weights_after([other for other in PRECISION if other != key])
        assert not all(after[name].equal(rest[name]) for name in after), key


# --- leaving one out --------------------------------------------------------------------------


def test_each_callback_of_the_full_stack_has_its_test_here():
    assert sorted(precision_keys(FULL)) == sorted(PRECISION)


def test_without_forward_quantization_nothing_is_quantized_or_kept():
    assert any(row.quantized for row in rows_of(FULL).values())
    for row in rows_of(FULL, ["forward_quantization"]).values():
        assert (row.train, row.rollout, row.kept_by, row.weight_decay) == (None, None, (), True)
    assert plan_of(FULL, ["forward_quantization"]).summary() == ("none of 57 linears below 16 bits")


def test_without_dequantized_backward_the_backward_alone_changes():
    differ = changed("dequantized_backward")
    assert differ.keys() == {layer for layer, row in rows_of(FULL).items() if row.quantized}
    for full, rest in differ.values():
        assert differing_fields((full, rest)) == {"train", "rollout"}
        for with_it, without in ((full.train, rest.train), (full.rollout, rest.rollout)):
            assert (with_it.backward, without.backward) == ("dequantized", "high_precision")
            assert replace(with_it, backward="high_precision") == without


def test_without_bf16_tail_the_last_layers_are_quantized_unless_kept_by_others():
    full, rest = rows_of(FULL), rows_of(FULL, ["bf16_tail"])
    tail = {layer for layer, row in full.items() if "bf16_tail" in row.kept_by}
    assert tail == {layer for layer in full if layer.startswith("model.layers.7.")}
    also = {layer for layer in tail if full[layer].kept_by != ("bf16_tail",)}
    assert {layer for layer in tail if rest[layer].quantized} == tail - also
    assert tail - also
    assert changed("bf16_tail").keys() == tail
    for layer in also:
        assert differing_fields((full[layer], rest[layer])) == {"kept_by"}
        assert rest[layer].kept_by == ("sensitive_weights",)
    body = rest["model.layers.0.mlp.up_proj"]
    assert all(rest[layer].train == body.train for layer in tail - also)
    assert all(not rest[layer].weight_decay for layer in tail - also)


def test_without_sensitive_weights_its_layers_outside_the_tail_are_quantized():
    full, rest = rows_of(FULL), rows_of(FULL, ["sensitive_weights"])
    mine = {layer for layer, row in full.items() if "sensitive_weights" in row.kept_by}
    in_tail = {layer for layer in mine if "bf16_tail" in full[layer].kept_by}
    assert mine - in_tail
    assert {layer for layer in mine if rest[layer].quantized} == mine - in_tail
    assert changed("sensitive_weights").keys() == mine
    for layer in in_tail:
        assert differing_fields((full[layer], rest[layer])) == {"kept_by"}
        assert rest[layer].kept_by == ("bf16_tail",)


def test_without_no_decay_on_quantized_the_decay_alone_changes():
    differ = changed("no_decay_on_quantized")
    assert differ.keys() == {layer for layer, row in rows_of(FULL).items() if row.quantized}
    for full, rest in differ.values():
        assert differing_fields((full, rest)) == {"weight_decay"}
        assert (full.weight_decay, rest.weight_decay) == (False, True)


@pytest.mark.parametrize("key", [key for key in callback_keys(FULL) if key not in PRECISION])
def test_without_another_callback_the_plan_is_the_same(key):
    assert changed(key) == {}


def test_without_all_precision_callbacks_the_layers_are_the_plain_ones():
    rest = rows_of(FULL, precision_keys(FULL))
    assert rest == rows_of("base")
    assert not any(row.quantized for row in rest.values())
