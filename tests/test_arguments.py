"""A mapping against a signature: the constructor is the schema."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lightning_qrl.arguments import check_arguments, parameters
from lightning_qrl.errors import UserError
from lightning_qrl.recipe import Recipe


@dataclass
class Settings:
    count: int
    rate: float = 0.5
    flag: bool = False
    name: str | None = None
    kind: Literal["a", "b"] = "a"
    numbers: Sequence[float] = (1.0,)
    table: dict[str, float] | None = None


class Open:
    def __init__(self, known: int = 1, *more: int, **options: Any) -> None:
        pass


class Foreign:
    def __init__(self, x: "NotImportedHere" = None, y: int = 1) -> None:  # noqa: F821
        pass


def check(given: dict[str, Any], target: Any = Settings, injected: tuple[str, ...] = ()) -> None:
    values = {"part": given}
    check_arguments(Recipe("r", values, (("r.yaml", values),)), "part", given, target, injected)


def failure(given: dict[str, Any], target: Any = Settings) -> str:
    with pytest.raises(UserError) as caught:
        check(given, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"count": 3},
        {"count": 3, "rate": 1},
        {"count": 3, "rate": 1.0, "flag": True, "name": "x", "kind": "b"},
        {"count": 3, "name": None, "numbers": [1, 2.5], "table": {"a": 1}},
        {"count": 3, "numbers": [], "table": {}},
    ],
)
def test_right_arguments_pass(given):
    check(given)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", "3"), ("count", True), ("count", 1.0), ("count", None), ("count", [3]),
        ("rate", "0.1"), ("rate", True), ("rate", None), ("rate", {}),
        ("flag", 1), ("flag", "yes"), ("flag", None),
        ("name", 5), ("name", ["x"]), ("kind", "c"), ("kind", None), ("kind", 1),
        ("numbers", 1.0), ("numbers", ["x"]), ("numbers", {"a": 1}), ("numbers", None),
        ("table", [1]), ("table", {"a": "x"}), ("table", "a"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named_with_its_key_and_value(key, value):
    message = failure({"count": 3, key: value})
    assert message.startswith(f"r.yaml: part.{key}: Input should be")
    assert f"got {value!r}" in message


def test_an_unknown_key_gives_the_nearest():
    assert failure({"cuont": 3}) == "r.yaml: part.cuont: no such key; did you mean count?"


def test_a_missing_key_is_named():
    assert failure({}) == "r.yaml: part: the key count is missing"


def test_injected_parameters_are_not_the_recipes():
    check({}, injected=("count",))
    values = {"count": 1}
    with pytest.raises(UserError, match=r"part\.count: no such key"):
        check_arguments(Recipe("r", {}, (("f", {}),)), "part", values, Settings, ("count",))


def test_open_ended_constructors_take_other_keys_but_check_their_own():
    assert parameters(Open.__init__) == ["self", "known"]
    check({"known": 2, "whatever": object()}, Open)
    assert "part.known" in failure({"known": "x"}, Open)


def test_annotations_that_cannot_be_evaluated_leave_the_judgement_to_the_constructor():
    check({"y": "anything"}, Foreign)
    assert "no such key" in failure({"z": 1}, Foreign)
