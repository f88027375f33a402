"""The reference model over a grid of settings."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any

from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import Summary, summarize

WORTH_A_PROCESS = 64  # runs: starting one takes as long as some twenty
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
    settings: Sequence[Settings],
    axes: Sequence[str],
    run: Callable[[Settings], Outcome],
    *,
    processes: int = 1,
) -> list[Point]:
    """Run each.

    Args:
        settings: of the runs.
        axes: names of the settings that vary.
        run: gives the summary of one, and notes on it; for several processes it can be pickled.
        processes: at one time, at most; few runs are not worth another one.
    """
    needed = min(processes, len(settings) // WORTH_A_PROCESS)
    if needed > 1:
        with ProcessPoolExecutor(needed, get_context("spawn")) as pool:
            outcomes = list(pool.map(run, settings, chunksize=WORTH_A_PROCESS // 4))
    else:
        outcomes = [run(one) for one in settings]
    return [
        Point(tuple(getattr(one, axis) for axis in axes), one, *outcome)
        for one, outcome in zip(settings, outcomes, strict=True)
    ]


def of_reference(settings: Settings) -> Outcome:
    """Of one run of the reference model."""
    return summarize(simulate(settings)), ()
