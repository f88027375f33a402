"""The arithmetic task: an exact verifier, nested levels, and a held-out split that stays out."""

import doctest
import re

import pytest

from lightning_qrl.tasks import arithmetic
from lightning_qrl.tasks.arithmetic import Arithmetic
from lightning_qrl.tasks.base import Prompt

LEVELS = range(1, 7)


def texts(difficulty, *splits):
    return {p.text for split in splits for p in Arithmetic(difficulty).prompts(split)}


def test_the_docstring():
    result = doctest.testmod(arithmetic)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "wrong",
    ["", "9", "095", "95 ", " 95", "+95", "-95", "95.0", "95\n", "9 5", "95=", "９５", "95<unk>"],
)
def test_only_the_very_answer_is_right(wrong):
    prompt = Prompt("37+58=", "95")
    assert Arithmetic().reward(prompt, "95") == 1.0
    assert Arithmetic().reward(prompt, wrong) == 0.0
    assert Arithmetic(reward_scale="pm1").reward(prompt, "95") == 1.0
    assert Arithmetic(reward_scale="pm1").reward(prompt, wrong) == -1.0


def test_minus_zero_is_wrong():
    zero = next(p for p in Arithmetic(1).prompts("train") if p.answer == "0")
    assert Arithmetic(1).reward(zero, "0") == 1.0
    assert Arithmetic(1).reward(zero, "-0") == 0.0


@pytest.mark.parametrize("scale", ["zero_one", "pm1"])
def test_solved_is_a_right_answer_on_either_scale(scale):
    task = Arithmetic(1, reward_scale=scale)
    prompt = task.prompts("train")[0]
    assert task.solved(task.reward(prompt, prompt.answer))
    assert not task.solved(task.reward(prompt, "no"))


@pytest.mark.parametrize("difficulty", LEVELS)
def test_answers_are_right_and_operands_have_the_digits_of_the_level(difficulty):
    prompts = Arithmetic(difficulty).prompts("train")
    for prompt in [*prompts[:500], *prompts[-500:]]:
        a, op, b = re.fullmatch(r"(\d+)([-+*])(\d+)=", prompt.text).groups()
        assert prompt.answer == str(eval(f"{int(a)}{op}{int(b)}"))
        assert len(a) <= difficulty
        assert len(b) <= (max(1, difficulty - 1) if op == "*" else difficulty)
        assert str(int(a)) == a
        assert str(int(b)) == b


def test_the_two_lowest_levels_are_complete():
    assert len(texts(1, "train", "held_out")) == 3 * 10 * 10
    assert len(texts(2, "train", "held_out")) == 2 * 100 * 100 + 100 * 10


@pytest.mark.parametrize("difficulty", LEVELS[1:])
def test_a_level_contains_the_levels_below_it(difficulty):
    above, below = (texts(d, "train", "held_out") for d in (difficulty, difficulty - 1))
    assert below < above
    assert any(len(text) > max(map(len, below)) for text in above)


def test_held_out_problems_are_trained_on_at_no_difficulty():
    trained = set().union(*(texts(d, "train") for d in LEVELS))
    held_out = set().union(*(texts(d, "held_out") for d in LEVELS))
    assert not trained & held_out
    assert 0.08 < len(held_out) / len(trained | held_out) < 0.12


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_splits_have_no_repeats_and_a_fixed_order(difficulty):
    for split in ("train", "held_out"):
        prompts = Arithmetic(difficulty).prompts(split)
        assert len({p.text for p in prompts}) == len(prompts)
        arithmetic._problems.cache_clear()
        assert list(Arithmetic(difficulty).prompts(split)) == list(prompts)


@pytest.mark.parametrize("difficulty", [0, 7, -1])
def test_a_difficulty_out_of_range(difficulty):
    with pytest.raises(ValueError, match=f"1 to 6, got {difficulty}"):
        Arithmetic(difficulty)


def test_wrong_names():
    with pytest.raises(ValueError, match="zero_one or pm1"):
        Arithmetic(reward_scale="percent")
    with pytest.raises(ValueError, match="train or held_out"):
        Arithmetic().prompts("test")


def test_commuted_twins_are_held_out_together():
    held_out = texts(2, "held_out")
    for op in "+*":
        twins = {op.join(reversed(text[:-1].split(op))) + "=" for text in held_out if op in text}
        assert twins & texts(2, "train", "held_out") <= held_out
