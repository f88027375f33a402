"""Factors: ``key=v1,v2`` on the command line is a list of values, one an arm.

Values are YAML, so a comma inside brackets or quotes belongs to the value:
``optimizer.betas=[0.9,0.98],[0.9,0.95]`` has two.
"""

import re
from collections.abc import Sequence
from itertools import product

from lightning_qrl.errors import UserError

OPENS, CLOSES, QUOTES = "[{", "]}", "'\""
BEFORE_A_QUOTE = ("", *"[{,:")  # elsewhere YAML takes it for a letter
FIXED = ("seed", "tracking")  # what the arms of a design have in common


def split_values(text: str) -> list[str]:
    """The values of a list; commas within brackets or quotes do not part them.

    Raises:
        ValueError: a value is empty or given twice, a bracket or a quote is not closed.
    """
    values, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            values.append("")
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES and values[-1].strip()[-1:] in BEFORE_A_QUOTE:
            quote = character
        else:
            depth += (character in OPENS) - (character in CLOSES)
        values[-1] += character
    if quote or depth:
        raise ValueError("a bracket or a quote is not closed")
    values = [value.strip() for value in values]
    if len(values) > 1 and "" in values:
        raise ValueError("a value is empty")
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is given twice")
    return values


def combinations(overrides: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Every combination of the factors' values.

    Args:
        overrides: ``key=value``, or ``key=v1,v2`` for a factor.

    Returns:
        A pair for each combination, the last factor's value changing fastest: what it sets of the
        factors, and all its overrides.

    Raises:
        UserError: a list is malformed, a factor is what the arms must have in common, or a key is
            given twice: the arms would be named by a value that another one replaces.
    """
    settings: list[list[str]] = []
    keys: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        _check_key(key, keys)
        keys.append(key)
        try:
            values = split_values(text)
        except ValueError as error:
            raise UserError(f"command line: {key}: {error}, got {text}") from None
        if len(values) > 1 and key.split(".")[0] in FIXED:
            remedy = "give --seeds" if key == "seed" else "give one value"
            raise UserError(f"command line: {key} is the same in every arm; {remedy}")
        settings.append([f"{key}{equals}{value}" for value in values])
    chosen = [tuple(combination) for combination in product(*settings)]
    factors = [len(values) > 1 for values in settings]
    return [
        (tuple(s for s, is_factor in zip(c, factors, strict=True) if is_factor), c) for c in chosen
    ]


def _check_key(key: str, before: Sequence[str]) -> None:
    if re.search(r"[\[\]\s]", key):
        raise UserError(f"command line: {key}: write a key with dots, as in grpo.loss=dapo,gspo")
    for other in before:
        if key == other:
            raise UserError(f"command line: {key} is given twice")
        inner, outer = sorted([key, other], key=len, reverse=True)
        if inner.startswith(f"{outer}."):
            raise UserError(f"command line: {inner} is given twice: {outer} sets it too")
