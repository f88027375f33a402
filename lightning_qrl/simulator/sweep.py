"""The reference model over a grid of settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import Summary, summarize


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a grid.

    Attributes:
        at: its values on the axes, in their order.
        settings: all that was set.
        summary: what came of it.
    """

    at: tuple[Any, ...]
    settings: Settings
    summary: Summary


def grid(common: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Settings of every combination, the last axis fastest.

    Args:
        common: settings of all.
        axes: values by setting.

    Raises:
        ValueError: one of them is impossible.
    """
    return [
        Settings(**{**common, **dict(zip(axes, at, strict=True))}) for at in product(*axes.values())
    ]


def sweep(
    settings: Sequence[Settings], axes: Sequence[str], constants: Constants = POST
) -> Iterator[Point]:
    """Run each.

    Args:
        settings: of the runs.
        axes: names of the settings that vary.
        constants: the model's numbers.
    """
    for one in settings:
        at = tuple(getattr(one, axis) for axis in axes)
        yield Point(at, one, summarize(simulate(one, constants), constants))
