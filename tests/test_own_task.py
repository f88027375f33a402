"""A task of one's own: found by its path, checked with the recipe, guarded while it judges."""

from collections.abc import Iterator
from math import isnan
from pathlib import Path

import pytest

from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.recipe import load_recipe
from lightning_qrl.tasks.base import Prompt

TASK = """
from lightning_qrl.tasks.base import Prompt

class Mine:
    def __init__(self, answer: str = "1"):
        self.answer = answer

    def prompts(self, split):
        return [Prompt(f"{i}+0=", self.answer) for i in range(20)]

    def reward(self, prompt, completion):
        return float(completion == prompt.answer)

    def solved(self, reward):
        return reward == 1.0
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "mine.py"
    file.write_text(TASK)
    yield file
    __import__("sys").modules.pop("mine", None)


def test_a_task_is_found_by_its_path_and_inherits_no_option_of_another(mine):
    run = build(load_recipe("base", ["task._target_=mine.Mine", "task.answer='7'"]))
    assert type(run.module.task).__name__ == "Mine"
    assert run.module.task.answer == "7"


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ("[]", "prompts('train') must give a list of prompts, at least one; got []"),
        ("None", "at least one; got None"),
        ("(p for p in ())", "at least one; got <generator"),
        ("['1+1=']", "must give Prompts with a text, got '1+1='"),
        ("[Prompt('')]", "must give Prompts with a text, got Prompt"),
        ("1 / 0", "prompts('train') failed: ZeroDivisionError: division by zero"),
        ("[Prompt('1')] * 20 if split == 'train' else []", "prompts('held_out') must give"),
    ],
)
def test_prompts_are_checked_when_the_recipe_is_read(prompts, says, mine):
    line = next(line for line in TASK.splitlines() if "return [Prompt" in line)
    mine.write_text(TASK.replace(line, f"        return {prompts}"))
    with pytest.raises(UserError) as error:
        build(load_recipe("base", ["task._target_=mine.Mine"]))
    assert str(error.value).startswith("command line: task: ")
    assert says in str(error.value)


def test_what_is_no_task_is_refused(mine):
    with pytest.raises(UserError, match=r"task\._target_: torch\.nn\.Linear is no task"):
        build(load_recipe("base", ["task._target_=torch.nn.Linear"]))
    with pytest.raises(UserError, match=r"task\._target_: cannot import 'mine\.Yours'"):
        build(load_recipe("base", ["task._target_=mine.Yours"]))


def module_with(task: object) -> PolicyModule:
    module = build(load_recipe("base")).module
    module.task = task  # type: ignore[assignment]
    return module


class Judge:
    def __init__(self, reward: object, solved: object = True):
        self.given, self.says = reward, solved

    def reward(self, prompt: Prompt, completion: str) -> object:
        return self.given

    def solved(self, reward: float) -> object:
        assert not isnan(reward)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.mark.parametrize("reward", [1e39, -1e300, float("inf")])
def test_a_reward_beyond_fp32_is_refused(reward):
    with pytest.raises(UserError, match="which is no FP32 number"):
        module_with(Judge(reward))._reward(Prompt("1+1="), "2")


def test_solved_is_asked_of_rewards_that_exist_and_named_when_it_fails():
    assert module_with(Judge(1.0, solved="yes"))._solved(1.0) is True
    with pytest.raises(UserError, match=r"solved\(1.0\) failed: KeyError"):
        module_with(Judge(1.0, solved=KeyError("x")))._solved(1.0)
