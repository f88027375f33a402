"""The reference model over a grid of settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import Summary, summarize

Outcome = tuple[Summary, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a grid.

    Attributes:
        at: its values on the axes, in their order.
        settings: all that was set.
        summary: what came of it.
        notes: why not to trust that.
    """

    at: tuple[Any, ...]
    settings: Settings
    summary: Summary
    notes: tuple[str, ...]


def grid(
    common: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    make: Callable[..., Settings] = Settings,
) -> list[Settings]:
    """Settings of every combination, the last axis fastest.

    Args:
        common: settings of all.
        axes: values by setting.
        make: settings of these values.

    Raises:
        ValueError: one of them is impossible.
    """
    return [
        make(**{**common, **dict(zip(axes, at, strict=True))}) for at in product(*axes.values())
    ]


def sweep(
    settings: Sequence[Settings], axes: Sequence[str], run: Callable[[Settings], Outcome]
) -> list[Point]:
    """Run each.

    Args:
        settings: of the runs.
        axes: names of the settings that vary.
        run: gives the summary of one, and notes on it.
    """
    return [Point(tuple(getattr(one, axis) for axis in axes), one, *run(one)) for one in settings]


def of_reference(settings: Settings) -> Outcome:
    """Of one run of the reference model."""
    return summarize(simulate(settings)), ()
