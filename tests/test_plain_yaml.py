"""Recipes are data: what could run code or grow without bound is one line, at once."""

import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.recipe import Recipe, load_recipe, recipe_from_yaml

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{this}: &{this} [{','.join([f'*{last}'] * 9)}]"
    for last, this in zip("abcdefgh", "bcdefghi", strict=True)
)
LISTS = "task:\n  a0: [1,1,1,1,1,1,1,1,1,1]\n" + "\n".join(
    "  a%d: [%s]" % (i, ",".join(['"${task.a%d}"' % (i - 1)] * 10))  # noqa: UP031
    for i in range(1, 8)
)
TEXTS = "task:\n" + "\n".join(f"  a{i}: ${{task.a{i - 1}}}${{task.a{i - 1}}}" for i in range(1, 40))
GROWS = "its interpolations come to more than 20000 values or 1000000 characters"
REFUSED = [
    (LISTS, GROWS),
    (LISTS.replace("${", "${oc.select:"), GROWS),
    (TEXTS + "\n  a0: xxxxxxxxxxxxxxxx", GROWS),
    ("task: {a: '" + "x" * 900_000 + "', b: ['${task.a}', '${task.a}']}", GROWS),
    ("seed: '" + "9" * 1_000_000 + "'", "the longest may have 1000000"),
    ("seed: 0x" + "f" * 100_000, "a number of 400000 bits; the longest has 256"),
    ("seed: !!python/object/apply:os.system ['touch pwned']", "line 1: !!python/object/apply"),
    ("seed: !!binary aGk=", "line 1: !!binary is no plain value"),
    ("seed: !own 3", "!own is no plain value"),
    (BOMB, "more than 20000 values, aliases written out"),
    ("a: &a {b: *a}", "holds itself"),
    ("a: " + "[" * 3000 + "]" * 3000, "nested more than 40 deep"),
    ("seed: 1\nseed: 2", "line 2: key seed is given twice"),
    ("grpo:\n  loss: dapo\n  'loss': gspo", "line 3: key loss is given twice"),
    ("seed: ${evaluate:1+1}", "Unsupported interpolation type evaluate full_key: seed"),
    ("seed: 1\n---\nseed: 2", "single document"),
    ("seed: " + "9" * 5000, "not readable as YAML"),
    ("a.b: 1", "mine.yaml: a.b: no such section"),
]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    OmegaConf.register_resolver("evaluate", eval, replace=True)
    yield tmp_path
    OmegaConf.clear_resolver("evaluate")


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_a_text_that_is_no_plain_data(here, text, says):
    (here / "mine.yaml").write_text(text)
    began = time.perf_counter()
    with pytest.raises(UserError) as caught:
        load_recipe("mine.yaml")
    assert says in str(caught.value)
    assert time.perf_counter() - began < 20
    assert not (here / "pwned").exists()


@pytest.mark.parametrize(
    "text", ["a${oc.env:HOME}", "${seed}", r"\${seed}", r"\\${seed}\x", "${", "$\\{x}", "${x}${y}"]
)
def test_a_resolved_text_is_resolved_only_once(here, text):
    recipe = Recipe("x", {"tracking": {"run_name": text}, "callbacks": {}}, (("x", {}),))
    assert recipe_from_yaml(recipe.to_yaml(), "x").values == recipe.values
    (here / "mine.yaml").write_text(recipe.to_yaml())
    assert load_recipe("mine.yaml").values == recipe.values


def test_an_override_is_held_to_the_same(here):
    for value in ("!!python/name:os.system ''", "${evaluate:1+1}", "{a: 1, a: 2}"):
        with pytest.raises(UserError, match="seed"):
            load_recipe("base", [f"seed={value}"])


def test_aliases_merges_and_own_resolvers_are_fine(here, monkeypatch):
    monkeypatch.setenv("QRL_TEST_SEED", "7")
    text = "seed: ${oc.decode:${oc.env:QRL_TEST_SEED}}\ntask: &t {a: 1}\ngrpo: {<<: *t, b: 2}\n"
    (here / "mine.yaml").write_text(text)
    assert load_recipe("mine.yaml").values == {
        "seed": 7, "task": {"a": 1}, "grpo": {"a": 1, "b": 2}, "callbacks": {},
    }  # fmt: skip


def test_a_module_of_pythons_own_is_not_even_imported():
    for name in ("this", "antigravity"):
        with pytest.raises(UserError, match="is of Python's own library"):
            build(load_recipe("base", [f"callbacks.x._target_={name}.x", "policy.init=random"]))
        assert name not in sys.modules


@pytest.mark.parametrize("section", ["task", "callbacks.odd"])
@pytest.mark.parametrize(
    "target",
    ["os.system", "subprocess.Popen", "os.path", "builtins.eval", "lightning.Trainer", "fails.X"],
)
def test_a_target_of_another_kind_is_never_called(here, section, target):
    (here / "fails.py").write_text("raise SystemExit('while it is imported')")
    with pytest.raises(UserError, match=f"{section}"):
        build(load_recipe("base", [f"{section}._target_={target}", "policy.init=random"]))
