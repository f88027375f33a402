"""What an ablation was to run: its design, as the parent run's ``design.json`` tells it.

With a factor (``grpo.loss=dapo,gspo``) there is a full arm for each of its levels. An arm is then
compared with the full arm of its own level, else what the factor does would be laid to the callback
that the arm leaves out; and the full arms with the first of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_qrl.reports.arms import Arm

FULL = ("full", "base")  # arms that are the baseline unless another one is named


@dataclass(frozen=True, slots=True)
class Planned:
    """The design of an ablation.

    Attributes:
        levels: of each arm, in the design's order, what it sets of the factors.
        full: of each such setting, the arm that leaves nothing out.
        seeds: of every arm.
    """

    levels: dict[str, tuple[str, ...]]
    full: dict[tuple[str, ...], str]
    seeds: tuple[int, ...]


def read_design(text: str) -> Planned | None:
    """A design from its JSON; None if it is none that is understood."""
    try:
        read = json.loads(text)
        levels = {str(arm["name"]): tuple(map(str, arm["overrides"])) for arm in read["arms"]}
        full = {levels[arm["name"]]: str(arm["name"]) for arm in read["arms"] if not arm["removed"]}
        full |= {
            tuple(name.split(", ")[1:]): str(of)
            for name, of in read.get("same", {}).items()
            if name.startswith("full, ")
        }
        seeds = tuple(int(seed) for seed in read["seeds"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return Planned(levels, full, seeds) if levels else None


def in_order(arms: Sequence[Arm], design: Planned | None) -> list[Arm]:
    """Arms in the order of the design, and behind them others; the baseline first."""
    if design is not None:
        places = {name: place for place, name in enumerate(design.levels)}
        return sorted(arms, key=lambda arm: places.get(arm.planned, len(places)))
    names = [arm.name for arm in arms]
    exact = next((name for name in FULL if name in names), None)
    chosen = exact or next((name for name in names if name.startswith(FULL[0])), names[0])
    return sorted(arms, key=lambda arm: arm.name != chosen)


def references(arms: Sequence[Arm], design: Planned | None) -> dict[str, Arm]:
    """By its name, what each arm but the first is compared with: the first, if nothing is planned.

    Args:
        arms: in their order.
        design: None: none is known, or the user named the baseline.
    """
    found = dict.fromkeys((arm.name for arm in arms[1:]), arms[0])
    if design is None:
        return found
    planned = {arm.planned: arm for arm in arms}
    for arm in arms[1:]:
        full = planned.get(design.full.get(design.levels.get(arm.planned, ()), ""))
        if full is not None and full is not arm:
            found[arm.name] = full
    return found


def on_unfinished(arms: Sequence[Arm], design: Planned | None) -> list[str]:
    """A note on the runs of a design that have not come to an end."""
    if design is None:
        return []
    wanted = {(arm, seed) for arm in design.levels for seed in design.seeds}
    ended = {
        (arm.planned, seed)
        for arm in arms
        for seed, run in arm.runs.items()
        if run.status in ("FINISHED", "FAILED")
    }
    left = len(wanted - ended)
    if not left:
        return []
    return [
        f"The ablation is unfinished: {left} of {len(wanted)} runs {'is' if left == 1 else 'are'} "
        "to come; the same qrl ablate command goes on."
    ]
