"""The design of an ablation: which arms, with which seeds.

    full              the recipe
    empty             without any ingredient
    without K         the recipe less one ingredient; with --pairs also less two
    only K            the empty stack and one ingredient

An ingredient is a callback that changes what is trained; instruments, which only watch, stay in
every arm. A factor (``grpo.loss=dapo,gspo``) multiplies the arms. Every arm has the same seeds, so
that arms pair. Two arms that come out as one recipe are one arm, under the first one's name.

A design is known by a hash of its arms, whatever the number of jobs: a second start of the same
command finds the first one's runs by it. So does one with other seeds, which are added to the runs
that are there.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import combinations as subsets
from typing import Any

from lightning_qrl.ablation.factors import combinations
from lightning_qrl.errors import UserError
from lightning_qrl.plugins import nearest
from lightning_qrl.recipe import MAX_SEED, Recipe, load_recipe

Ingredients = Callable[[Recipe], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Arm:
    """One recipe of a design.

    Attributes:
        name: unique in the design, such as ``without bf16_tail, grpo.loss=gspo``.
        removed: callbacks that it leaves out.
        overrides: what it sets of the factors.
        recipe: the resolved recipe, as YAML; its seed is the first of the design.
        recipe_hash: see `Recipe.hash`.
    """

    name: str
    removed: tuple[str, ...]
    overrides: tuple[str, ...]
    recipe: str
    recipe_hash: str


@dataclass(frozen=True, slots=True)
class Design:
    """What an ablation runs: each arm with each seed.

    Attributes:
        recipe: name of the recipe.
        arms: the first is the full stack.
        seeds: ascending.
        same: names of arms that were left out, and of the arm that each is the same as.
    """

    recipe: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    same: dict[str, str]

    def hash(self) -> str:
        """SHA-256 (16 hex digits) of the arms' names and recipes."""
        arms = [(arm.name, arm.recipe_hash) for arm in self.arms]
        return sha256(json.dumps([self.recipe, arms]).encode()).hexdigest()[:16]

    @property
    def size(self) -> str:
        """How many arms and seeds, for people."""
        seeds = len(self.seeds)
        return f"{len(self.arms)} arms x {seeds} seed{'s' if seeds > 1 else ''}"

    def to_json(self) -> dict[str, Any]:
        """Plain containers, for a JSON artefact."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**plain, "hash": self.hash()}


@dataclass(frozen=True, slots=True)
class Wish:
    """What of the stack is to be taken away.

    Attributes:
        drop: callbacks to leave out one by one; empty for every ingredient.
        only: ingredients to add to the empty stack, one by one.
        pairs: whether to leave out each pair too.
        seeds: number of seeds.
    """

    drop: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    pairs: bool = False
    seeds: int = 1


def make_design(
    name: str, overrides: Sequence[str], wish: Wish, ingredients: Ingredients
) -> Design:
    """The design of an ablation.

    Args:
        name: of the recipe, see `find_recipe`.
        overrides: ``key=value``; with commas between values it is a factor.
        wish: what to take away.
        ingredients: the keys of a recipe's callbacks that are ingredients; it may raise UserError,
            if the recipe cannot be run.

    Raises:
        UserError: a key or a number is wrong, or there is nothing to compare.
    """
    if wish.seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {wish.seeds}")
    arms: dict[str, Arm] = {}
    same: dict[str, str] = {}
    paired = False
    for setting, chosen in combinations(overrides):
        full = load_recipe(name, chosen)
        _check_keys(full, wish)
        own = ingredients(full)
        dropped = [key for key in full.values["callbacks"] if key in (wish.drop or own)]
        paired |= len(dropped) > 1
        for stack, removed in _stacks(own, dropped, wish):
            recipe = load_recipe(name, chosen, removed)
            label, of = ", ".join([stack, *setting]), recipe.hash()
            if of in arms:
                same.setdefault(label, arms[of].name)
            else:
                arms[of] = Arm(label, tuple(removed), setting, recipe.to_yaml(), of)
    first = full.values.get("seed", 0)
    last = first + wish.seeds - 1
    if last > MAX_SEED:
        raise UserError(f"--seeds: the last seed would be {last}; the largest is {MAX_SEED}")
    if wish.pairs and not paired:
        raise UserError("--pairs: there is no pair of callbacks to leave out; name two with --drop")
    if len(arms) == 1:
        raise UserError(_nothing_to_compare(full, same))
    return Design(full.name, tuple(arms.values()), tuple(range(first, last + 1)), same)


def _check_keys(full: Recipe, wish: Wish) -> None:
    known = list(full.values["callbacks"])
    for option, keys in (("--drop", wish.drop), ("--only", wish.only)):
        for key in keys:
            if key not in known:
                raise UserError(f"{option} {key}: no such callback; {nearest(key, known)}")


def _nothing_to_compare(full: Recipe, same: dict[str, str]) -> str:
    if same:
        names = [next(iter(same.values())), *same]
        return f"recipe {full.name}: all arms are one recipe: {' = '.join(names)}"
    return (
        f"recipe {full.name} has no ingredient to take away: its callbacks only watch; "
        "name one with --drop, or give a factor such as grpo.loss=dapo,gspo"
    )


def _stacks(
    ingredients: Sequence[str], dropped: Sequence[str], wish: Wish
) -> Iterator[tuple[str, list[str]]]:
    """Names of the arms of one combination of factors, and what each leaves out."""
    yield "full", []
    if ingredients:
        yield "empty", list(ingredients)
    for key in dropped:
        yield f"without {key}", [key]
    for pair in subsets(dropped, 2) if wish.pairs else ():
        yield f"without {' and '.join(pair)}", list(pair)
    for key in dict.fromkeys(wish.only):
        yield f"only {key}", [other for other in ingredients if other != key]
