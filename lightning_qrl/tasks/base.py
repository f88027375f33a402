"""What a task is: prompts behind two splits, and a reward for a completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task.

    Attributes:
        text: what the policy reads.
        answer: what a right completion says; tasks without a single answer leave it empty.
    """

    text: str
    answer: str = ""


class Task(Protocol):
    """A source of prompts and the judge of completions.

    The two splits never share a prompt: what is trained on is never what progress is measured on.
    """

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All prompts of a split, in a fixed order."""

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The reward of one completion, decoded without its closing end-of-sequence token."""

    def solved(self, reward: float) -> bool:
        """Whether a reward means success."""
