"""Recipes mutated at random: keys renamed, dropped, moved, values of other types, odd YAML."""

import copy
import random
from collections.abc import Callable
from typing import Any

import yaml

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 10**30, -(10**18), 0.0, 0.5, 1e-300, 1e300, float("nan"),
    float("inf"), "", " ", "none", "nvfp4", "*", "**", "a b", "é", "\n", "${seed}", "${nothing}",
    "${eval:1}", "${oc.env:HOME}", "???", "/", "..", "x" * 5000, [], [1], ["a", None], [[]], {},
    {"a": 1}, {"name": "dapo"}, {"_target_": "os.system"}, [0.5, 0.5], "1e-3", "3",
]  # fmt: skip
ODD_KEYS: list[Any] = ["", "a.b", "_target_", "name", "self", "seed", "é", "x y", 1, None, True]
TARGETS = [
    "os.system", "subprocess.Popen", "builtins.eval", "os", "lightning.Trainer", "nothing.at.all",
    "lightning.pytorch.callbacks.EarlyStopping", "callbacks.bf16_tail.BF16Tail", "", "..", 5, None,
    "lightning_qrl.tasks.arithmetic.Arithmetic", "pathlib.Path", "this is no path",
]  # fmt: skip
ODD_TEXT: list[Callable[[str, random.Random], str]] = [
    lambda text, draw: text + "\nseed: 3\n",
    lambda text, draw: text.replace("  ", "\t", draw.randint(1, 3)),
    lambda text, draw: "\ufeff" + text,
    lambda text, draw: text + "\n---\nseed: 2\n",
    lambda text, draw: text[: draw.randrange(len(text))],
    lambda text, draw: text.replace(":", "", 1),
    lambda text, draw: text + "\nevil: !!python/object/apply:os.system ['touch pwned']\n",
    lambda text, draw: text + "\na: &a [*a, *a]\n",
    lambda text, draw: "- " + text,
    lambda text, draw: text.replace(": ", ": !!str ", draw.randint(1, 4)),
    lambda text, draw: text.replace(": ", ": *", 1),
    lambda text, draw: text.replace("\n", "\r", draw.randint(1, 5)),
    lambda text, draw: text.replace("a", "\x07", 1),
    lambda text, draw: text + "\nx: " + "[" * 60 + "]" * 60,
]


def _places(values: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in nested containers."""
    found = []
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        found.append((values, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


def _near(value: Any, draw: random.Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice([value * 2, value + 1, value - 1, -value, value * 10**6, type(value)(0)])
    words = ["none", "row", "tensor", "nearest", "stochastic", "mlp", "attention", "dapo", "gspo"]
    return draw.choice([*words, "fp8_e4m3", "int4"]) if isinstance(value, str) else value


def _mutate(values: dict[str, Any], draw: random.Random) -> str:
    """Change one thing in place; says what."""
    where, key = draw.choice(_places(values))
    kinds = ["drop", "rename", "value", "value", "near", "near", "near", "nest", "add", "target"]
    kind = draw.choice([*kinds, "move"])
    if kind == "drop":
        where.pop(key)
    elif kind == "rename" and isinstance(where, dict):
        new = draw.choice([*ODD_KEYS, f"{key}s", str(key)[1:], str(key).upper()])
        where[new] = where.pop(key)
    elif kind == "nest":
        where[key] = draw.choice([{key: where[key]}, [where[key]], {"value": where[key]}])
    elif kind == "add" and isinstance(where[key], dict):
        where[key][draw.choice(ODD_KEYS)] = draw.choice(ODD_VALUES)
    elif kind == "target":
        section = draw.choice(["task", "callbacks"])
        target = {"_target_": draw.choice(TARGETS)}
        if isinstance(values.get(section), dict):
            values[section] = target if section == "task" else {**values[section], "odd": target}
    elif kind == "move":
        other, at = draw.choice(_places(values))
        where[key] = copy.deepcopy(other[at])
    elif kind == "near":
        where[key] = _near(where[key], draw)
    else:
        where[key] = draw.choice(ODD_VALUES)
    return f"{kind} {key}"


def mutated(values: dict[str, Any], seed: int) -> tuple[str, str]:
    """The YAML of a recipe with one to three mutations, and what they are."""
    draw = random.Random(seed)
    values = copy.deepcopy(values)
    done = [_mutate(values, draw) for _ in range(draw.choice([1, 1, 1, 2, 3])) if values]
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if draw.random() < 0.12:
        odd = draw.randrange(len(ODD_TEXT))
        text, done = ODD_TEXT[odd](text, draw), [*done, f"text {odd}"]
    return text, ", ".join(done)
