"""What an ablation runs: arms, their names, and which of them are one."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_qrl.ablation.design import Design, Wish, make_design
from lightning_qrl.ablation.factors import combinations, split_values
from lightning_qrl.errors import UserError
from lightning_qrl.recipe import MAX_SEED, Recipe, load_recipe, recipe_from_yaml

STACK = ["forward_quantization", "dequantized_backward", "bf16_tail", "sensitive_weights"]
INGREDIENTS = [*STACK, "no_decay_on_quantized"]  # of 4bitter
WATCHING = set(load_recipe("base").values["callbacks"])


def ingredients(recipe: Recipe) -> list[str]:
    return [key for key in recipe.values["callbacks"] if key in INGREDIENTS]


def design(*overrides: str, name: str = "4bitter", **wish) -> Design:
    return make_design(name, overrides, Wish(**wish), ingredients)


def names(of: Design) -> list[str]:
    return [arm.name for arm in of.arms]


def stack(of: Design, name: str) -> set[str]:
    """The ingredients of an arm."""
    (arm,) = (arm for arm in of.arms if arm.name == name)
    callbacks = set(recipe_from_yaml(arm.recipe, "x").values["callbacks"])
    assert callbacks & WATCHING, "instruments stay"
    return callbacks - WATCHING


def test_each_ingredient_is_left_out_once():
    made = design(seeds=3)
    assert names(made) == ["full", "empty", *(f"without {key}" for key in INGREDIENTS)]
    assert made.seeds == (0, 1, 2)
    assert stack(made, "full") == set(INGREDIENTS)
    assert stack(made, "empty") == set()
    for key in INGREDIENTS:
        assert stack(made, f"without {key}") == set(INGREDIENTS) - {key}


def test_an_arm_is_what_fit_without_trains():
    made = design(drop=("bf16_tail",))
    fit = load_recipe("4bitter", without=["bf16_tail"])
    assert made.arms[2].recipe_hash == fit.hash()
    assert recipe_from_yaml(made.arms[2].recipe, "4bitter").values == fit.values


def test_pairs_only_and_drop():
    made = design(drop=("bf16_tail", "live_view"), only=("dequantized_backward",), pairs=True)
    dropped = ["without live_view", "without bf16_tail", "without live_view and bf16_tail"]
    assert names(made) == ["full", "empty", *dropped, "only dequantized_backward"]
    assert stack(made, "only dequantized_backward") == {"dequantized_backward"}
    assert stack(made, "without bf16_tail") == set(INGREDIENTS) - {"bf16_tail"}


def test_a_factor_multiplies_the_arms():
    made = design("grpo.loss=dapo,gspo", "trainer.max_steps=7", drop=("bf16_tail",))
    stacks = ["full", "empty", "without bf16_tail"]
    assert names(made) == [
        f"{arm}, grpo.loss={loss}" for loss, arm in product(["dapo", "gspo"], stacks)
    ]
    for arm in made.arms:
        values = recipe_from_yaml(arm.recipe, "x").values
        assert f"grpo.loss={values['grpo']['loss']}" in arm.name
        assert values["trainer"]["max_steps"] == 7


def test_arms_that_are_one_recipe_are_run_once():
    only = [f"callbacks.{key}=null" for key in INGREDIENTS[1:]]
    made = design(*only)
    assert names(made) == ["full", "empty"]
    assert made.same == {"without forward_quantization": "empty"}
    factor = design("callbacks.bf16_tail.fraction=0.1,0.2", drop=("bf16_tail",))
    one, two = (f"callbacks.bf16_tail.fraction={value}" for value in (0.1, 0.2))
    assert factor.same[f"empty, {two}"] == f"empty, {one}"
    assert factor.same[f"without bf16_tail, {two}"] == f"without bf16_tail, {one}"
    assert len(factor.arms) == 4


def test_a_factor_alone_is_a_design():
    made = design("grpo.loss=dapo,gspo", name="base")
    assert names(made) == ["full, grpo.loss=dapo", "full, grpo.loss=gspo"]


def test_a_hash_knows_the_arms_and_nothing_else():
    same = design("tracking.folder=elsewhere", "seed=7", seeds=2)
    assert same.hash() == design(seeds=5).hash() == same.to_json()["hash"]
    others = [design("grpo.loss=gspo", seeds=2), design(seeds=2, drop=("bf16_tail",))]
    assert same.hash() not in {other.hash() for other in others}


def test_a_size_is_plain_english():
    assert design(drop=("bf16_tail",)).size == "3 arms x 1 seed"
    assert design(drop=("bf16_tail",), seeds=2).size == "3 arms x 2 seeds"


def test_the_artefact_is_plain():
    made = design("grpo.loss=dapo,gspo", seeds=2)
    plain = json.loads(json.dumps(made.to_json()))
    assert plain["seeds"] == [0, 1]
    assert [arm["name"] for arm in plain["arms"]] == names(made)
    assert plain["arms"][1]["removed"] == INGREDIENTS


@pytest.mark.parametrize(
    ("overrides", "wish", "said"),
    [
        (
            [],
            {"drop": ("bf16_tial",)},
            "--drop bf16_tial: no such callback; did you mean bf16_tail",
        ),
        ([], {"only": ("bf16",)}, "--only bf16: no such callback"),
        ([], {"seeds": 0}, "--seeds must be at least 1, got 0"),
        ([f"seed={MAX_SEED}"], {"seeds": 2}, f"the last seed would be {MAX_SEED + 1}"),
        (["seed=1,2"], {}, "seed is the same in every arm; give --seeds"),
        (["[seed]=1,2"], {}, "[seed]: write a key with dots, as in grpo.loss=dapo,gspo"),
        (["grpo[loss]=dapo"], {}, "grpo[loss]: write a key with dots"),
        (["seed =1,2"], {}, "seed : write a key with dots"),
        (["tracking={folder: a},{folder: b}"], {}, "tracking is the same in every arm"),
        (["grpo.loss=dapo,gspo", "grpo.loss=cispo"], {}, "grpo.loss is given twice"),
        (["grpo.loss=dapo,gspo", "grpo={loss: cispo}"], {}, "given twice: grpo sets it too"),
        (["callbacks.a=null", "callbacks.a.b=1,2"], {}, "given twice: callbacks.a sets it too"),
        (["grpo.loss=dapo,gspo, dapo"], {}, "grpo.loss: dapo is given twice"),
        ([], {"drop": ("bf16_tail",), "pairs": True}, "--pairs: there is no pair of callbacks"),
        (
            [f"callbacks.{key}=null" for key in INGREDIENTS] + ["grpo.group_size=8,0x8"],
            {},
            "all arms are one recipe: full, grpo.group_size=8 = full, grpo.group_size=0x8",
        ),
        (["tracking.folder=a,b"], {}, "tracking.folder is the same in every arm"),
        (["grpo.loss=dapo,"], {}, "grpo.loss: a value is empty"),
        (["optimizer.betas=[0.9"], {}, "optimizer.betas: a bracket or a quote is not closed"),
        (["grpo2.loss=dapo,gspo"], {}, "grpo2: no such section; did you mean grpo"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(overrides, wish, said):
    with pytest.raises(UserError) as error:
        design(*overrides, **wish)
    assert said in str(error.value)


def test_a_stack_that_only_watches_has_nothing_to_ablate():
    with pytest.raises(UserError, match="recipe base has no ingredient to take away"):
        design(name="base")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("dapo", ["dapo"]),
        ("", [""]),
        ("dapo, gspo", ["dapo", "gspo"]),
        ("[0.9,0.98],[0.9,0.95]", ["[0.9,0.98]", "[0.9,0.95]"]),
        ("{a: 1, b: [2,3]},null", ["{a: 1, b: [2,3]}", "null"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("don't,won't", ["don't", "won't"]),
    ],
)
def test_commas_part_values_outside_brackets_and_quotes(text, values):
    assert split_values(text) == values


VALUE = st.recursive(
    st.from_regex(r"[a-z0-9.]{1,4}|'[a-z,\[]{0,4}'", fullmatch=True),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]"),
)


@given(st.lists(VALUE, min_size=1, max_size=4, unique=True))
def test_values_are_parted_as_they_were_joined(values):
    assert split_values(",".join(values)) == values


def test_combinations_are_the_product_in_order():
    made = combinations(["a=1,2", "b=3", "c=x,y"])
    assert [setting for setting, _ in made] == [
        (f"a={a}", f"c={c}") for a, c in product("12", "xy")
    ]
    assert made[1][1] == ("a=1", "b=3", "c=y")
