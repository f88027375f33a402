"""Recipes: finding, extending, overriding; every mistake is one line that says where it is."""

from pathlib import Path

import pytest

from lightning_qrl.errors import UserError
from lightning_qrl.recipe import find_recipe, load_recipe, recipe_from_yaml, recipe_names


@pytest.fixture
def write(tmp_path):
    def writer(text: str | bytes, name: str = "mine.yaml") -> str:
        file = tmp_path / name
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(file)

    return writer


def failure(name: str, *overrides: str, without: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(name, overrides, without)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_shipped_recipe_loads_and_has_a_purpose():
    assert {"base", "bf16", "fp8", "mxfp8", "nvfp4_naive", "4bitter", "warmup"} <= {*recipe_names()}
    for name in recipe_names():
        assert find_recipe(name).read_text().startswith("# ")
        assert load_recipe(name).name == name


def test_a_name_with_or_without_suffix_means_the_same():
    assert load_recipe("4bitter") == load_recipe("4bitter.yaml")


def test_a_child_is_merged_over_its_parent(write):
    write("grpo: {group_size: 4, loss: dapo}\ncallbacks: {a: {x: 1}, b: {}}", "parent.yaml")
    child = write("extends: parent\ngrpo: {group_size: 8}\ncallbacks: {b: null, c: {y: [1, 2]}}")
    assert load_recipe(child).values == {
        "grpo": {"group_size": 8, "loss": "dapo"},
        "callbacks": {"a": {"x": 1}, "c": {"y": [1, 2]}},
    }


def test_a_parent_is_looked_for_beside_the_child_first(write):
    write("seed: 7", "base.yaml")
    assert load_recipe(write("extends: base.yaml")).values["seed"] == 7


def test_callbacks_keep_their_order():
    keys = list(load_recipe("4bitter").values["callbacks"])
    parent = list(load_recipe("base").values["callbacks"])
    assert keys[: len(parent)] == parent
    assert keys.index("forward_quantization") < keys.index("bf16_tail")


def test_interpolation_is_resolved(write):
    recipe = load_recipe(write("seed: 3\ngrpo: {group_size: '${seed}'}"), ["seed=5"])
    assert recipe.values["grpo"]["group_size"] == 5


def test_overrides_reach_any_depth():
    overrides = [
        "trainer.max_steps=3",
        "optimizer.betas=[0.5,0.6]",
        "callbacks.bf16_tail.fraction=0.3",
        "callbacks.sensitive_weights.select=[mlp,attention]",
        "callbacks.forward_quantization.weight.outer_scale=row",
        "callbacks.live_view=null",
        "policy.name=a=b",
        "optimizer.lr=1e-3",
    ]
    values = load_recipe("4bitter", overrides).values
    assert values["trainer"]["max_steps"] == 3
    assert values["optimizer"]["betas"] == [0.5, 0.6]
    assert values["callbacks"]["bf16_tail"] == {"fraction": 0.3}
    assert values["callbacks"]["sensitive_weights"] == {"select": ["mlp", "attention"]}
    assert values["callbacks"]["forward_quantization"]["weight"] == {"outer_scale": "row"}
    assert "live_view" not in values["callbacks"]
    assert values["policy"]["name"] == "a=b"
    assert values["optimizer"]["lr"] == 1e-3


def test_without_leaves_out_just_the_callbacks_named():
    whole = load_recipe("4bitter").values
    part = load_recipe("4bitter", without=["bf16_tail", "live_view"]).values
    left = {k: v for k, v in whole["callbacks"].items() if k not in ("bf16_tail", "live_view")}
    assert part == {**whole, "callbacks": left}


@pytest.mark.parametrize("name", recipe_names())
def test_a_resolved_recipe_is_a_recipe_again(name, write):
    recipe = load_recipe(name, ["seed=2", "callbacks.live_view=null"])
    again = load_recipe(write(recipe.to_yaml()))
    assert again.values == recipe.values
    assert list(again.values["callbacks"]) == list(recipe.values["callbacks"])
    assert recipe_from_yaml(recipe.to_yaml(), name).values == recipe.values


def test_flat_has_every_value_by_its_dotted_key(write):
    recipe = load_recipe(write("seed: 1\ngrpo: {loss: dapo}\ncallbacks: {a: {}, b: {c: {d: [1]}}}"))
    assert recipe.flat() == {
        "seed": 1, "grpo.loss": "dapo", "callbacks.a": {}, "callbacks.b.c.d": [1],
    }  # fmt: skip


def test_the_nearest_names_of_a_recipe_that_is_not_there():
    near = "did you mean 4bitter or 4bitter_moe or 4bitter_async?"
    assert failure("4biter.yaml") == f"recipe 4biter.yaml not found; {near}"
    assert "known: 4bitter, 4bitter_async, 4bitter_moe, base" in failure("zzz")


def test_an_error_names_the_file_that_set_the_key_last(write):
    parent = write("grpo: {group_size: 4}\nrollouts: {}", "parent.yaml")
    child = write("extends: parent\ngrpo: {group_size: 8}")
    message = failure(child)
    assert message.startswith(f"{parent}: rollouts: no such section; did you mean rollout")
    assert failure(child, "rollouts={a: 1}").startswith("command line: rollouts: no such section")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not readable as YAML"),
        ("a: 1\na: 2", "not readable as YAML"),
        ("- a\n- b", "a recipe is a mapping"),
        ("just words", "got a single value"),
        ("5", "not readable as YAML"),
        (b"\x00\x01\x02\xff", "not readable as YAML"),
        (b"\xff\xfe\xfa", "not readable as YAML"),
        ("a: &a [*a]", "not readable as YAML"),
        ("? {x: 1}\n: 2", "not readable as YAML"),
        ("trainer: null", "trainer: expected a mapping, got None"),
        ("trainer: [1]", "trainer: expected a mapping, got [1]"),
        ("trainer: 5", "trainer: expected a mapping, got 5"),
        ("seed: -1", "seed: expected an integer"),
        ("seed: 4294967296", "seed: expected an integer"),
        ("seed: true", "seed: expected an integer"),
        ("seed: 1.5", "seed: expected an integer"),
        ("seed: null", "seed: expected an integer"),
        ("extends: nowhere", "extends: recipe nowhere not found; known: "),
        ("extends: mine", "mine.yaml: extends itself through"),
        ("extends: ../{folder}/mine.yaml", "extends itself through"),
        ("extends: [base]", "extends: expected the name of a recipe, got ['base']"),
        ("grpo: {loss: '${nowhere}'}", "nowhere"),
        ("grpo: {loss: '${a'}", "mine.yaml"),
        ("grpo:\n  loss: ???", "Missing mandatory value"),
        ("seed: ${seed}", "mine.yaml"),
        ("5: {a: 1}", "5: no such section"),
        ("null: {a: 1}", "mine.yaml"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line(write, tmp_path, text, says):
    if isinstance(text, str):
        text = text.replace("{folder}", tmp_path.name)
    assert says in failure(write(text))


def test_a_cycle_of_two_is_named(write):
    write("extends: b", "a.yaml")
    assert "extends itself through" in failure(write("extends: a", "b.yaml"))


def test_a_folder_is_no_recipe(tmp_path):
    assert failure(str(tmp_path)) == f"recipe {tmp_path} is a folder; name a file in it"
    (tmp_path / "x.yaml").mkdir()
    assert "is a folder" in failure(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("name", ["", "x" * 5000, "a/b/c", "/proc/self/mem.yaml", "a\0b"])
def test_odd_names_are_not_found(name):
    assert "not found" in failure(name)


@pytest.mark.parametrize(
    "override",
    ["seed", "=1", "seed=[1", "a..b=1", ".a=1", "a.=1", "grpo={a: 1", "seed=${", "grpo=1", "x=1"],
)
def test_a_bad_override_is_one_line_about_the_command_line(override):
    assert failure("base", override).startswith(("command line: ", str(find_recipe("base"))))


def test_without_an_unknown_callback_gives_the_nearest():
    message = failure("4bitter", without=("bf16_tial",))
    assert message.startswith("--without bf16_tial: no such callback; did you mean bf16_tail")


def test_keys_that_are_no_text_become_text(write):
    values = load_recipe(write("callbacks: {1: {2: {true: a}}}")).values
    assert values["callbacks"] == {"1": {"2": {"True": "a"}}}


def test_a_recipe_of_the_working_directory_comes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("seed: 9")
    assert load_recipe("base").values["seed"] == 9


def test_what_nothing_sets_is_the_recipes_fault():
    recipe = recipe_from_yaml("seed: 1\n", "own", ["grpo={}"], label="own.yaml")
    assert str(recipe.error("task", "give name")) == "own.yaml: task: give name"
    assert str(recipe.error("grpo.loss", "no")) == "own.yaml: grpo.loss: no"
    assert str(recipe.error("grpo", "no")) == "command line: grpo: no"
