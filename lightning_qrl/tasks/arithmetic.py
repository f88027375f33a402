"""Integer arithmetic with an exact verifier: additions, subtractions and products.

At ``difficulty`` d, sums and differences take operands of up to d digits, and products one of up to
d digits with one of up to max(1, d - 1). Levels 1 and 2 are complete; each higher level is the one
below it and a fixed random sample of its own problems.

    >>> task = Arithmetic(difficulty=2)
    >>> prompt = Prompt("37+58=", answer="95")
    >>> task.reward(prompt, "95"), task.reward(prompt, "095"), task.reward(prompt, "95 ")
    (1.0, 0.0, 0.0)

A tenth of all problems is held out, chosen by a hash of the problem: the split depends on neither
the seed nor the difficulty, so a problem held out once is held out everywhere. Sums and products
are held out together with their commuted twin: 3+4 in training would give 4+3 away.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Literal

from lightning_qrl.tasks.base import Prompt, Split

COMPLETE_LEVELS = 2
SAMPLE = 25_000  # problems that each higher level adds to the one below it
HELD_OUT_SHARE = 10  # one problem in this many
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


class Arithmetic:
    """The arithmetic task.

    Args:
        difficulty: digits of the operands, 1 to 6.
        reward_scale: ``"zero_one"`` rewards 1 or 0, ``"pm1"`` rewards +1 or -1.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, difficulty: int = 2, reward_scale: Literal["zero_one", "pm1"] = "zero_one"
    ) -> None:
        if not 1 <= difficulty <= 6:
            raise ValueError(f"difficulty must be 1 to 6, got {difficulty}")
        if reward_scale not in ("zero_one", "pm1"):
            raise ValueError(f"reward_scale must be zero_one or pm1, got {reward_scale!r}")
        self.difficulty = difficulty
        self.wrong = 0.0 if reward_scale == "zero_one" else -1.0

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The problems of a split, in a fixed order."""
        if split not in ("train", "held_out"):
            raise ValueError(f"split must be train or held_out, got {split!r}")
        return [p for p in _problems(self.difficulty) if _held_out(p) == (split == "held_out")]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 for exactly the answer, else 0 (or -1)."""
        return 1.0 if completion == prompt.answer else self.wrong

    def solved(self, reward: float) -> bool:
        """A right answer earns 1 on either scale."""
        return reward == 1.0


def _held_out(prompt: Prompt) -> bool:
    problem = prompt.text.removesuffix("=")
    for op in "+*":
        problem = op.join(sorted(problem.split(op)))
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def _prompt(a: int, op: str, b: int) -> Prompt:
    return Prompt(f"{a}{op}{b}=", str(OPERATIONS[op](a, b)))


def _operand_limits(difficulty: int, op: str) -> tuple[int, int]:
    second = max(1, difficulty - 1) if op == "*" else difficulty
    return 10**difficulty, 10**second


def _every_problem(difficulty: int) -> Iterator[Prompt]:
    for op in OPERATIONS:
        limit_a, limit_b = _operand_limits(difficulty, op)
        yield from (_prompt(a, op, b) for a in range(limit_a) for b in range(limit_b))


def _sampled_problems(difficulty: int) -> Iterator[Prompt]:
    draw = random.Random(difficulty)
    while True:
        op = draw.choice(list(OPERATIONS))
        # digits first, then the number: short operands stay as common as long ones
        limits = [10 ** draw.randint(1, len(str(n - 1))) for n in _operand_limits(difficulty, op)]
        yield _prompt(draw.randrange(limits[0]), op, draw.randrange(limits[1]))


@cache
def _problems(difficulty: int) -> tuple[Prompt, ...]:
    if difficulty <= COMPLETE_LEVELS:
        return tuple(_every_problem(difficulty))
    below = _problems(difficulty - 1)
    chosen = dict.fromkeys(below)
    stream = _sampled_problems(difficulty)
    while len(chosen) < len(below) + SAMPLE:
        chosen[next(stream)] = None
    return tuple(chosen)
