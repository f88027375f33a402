"""A sweep of clusters in the terminal and as JSON: a table over one setting, heat maps over two.

A combination that no cluster can have is marked in its place, with the reason below.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from lightning_qrl.reports.simulation import labelled
from lightning_qrl.reports.simulation_cluster import outcome_json, settings_json, settings_text
from lightning_qrl.reports.simulation_sweep import (
    IMPOSSIBLE,
    Cell,
    heat_map,
    scale_text,
    table_that_fits,
)
from lightning_qrl.reports.simulation_timeline import AMISS, Glyphs
from lightning_qrl.simulator.cluster import Cluster, Outcome
from lightning_qrl.simulator.words import plain

Outcomes = Mapping[tuple[Any, ...], Outcome | str]  # by values of the axes; or why there is none
MOST_REASONS = 5
MAPS = {  # of a sweep over two settings: what is drawn, and its form
    "steps an hour": "{:.1f}",
    "mean staleness": "{:.1f}",
    "rollouts discarded, %": "{:.0f}",
    "samplers busy, %": "{:.0f}",
    "trainers busy, %": "{:.0f}",
}
HEADINGS = ("steps/h", "stale", "p99", "discarded", "samplers", "trainers", "reward", "diverged")
RANKED = ("steps/h", "diverged", "stale", "discarded", "trainers", "samplers", "reward", "p99")
LEGEND = {
    "stale": "stale: mean versions behind",
    "p99": "p99: of 99% of rollouts at most",
    "discarded": "discarded: share of rollouts",
    "trainers": "samplers, trainers: share of the time at work",
}


def clusters_text(
    common: Cluster,
    axes: Sequence[str],
    outcomes: Outcomes,
    width: int,
    glyphs: Glyphs,
    plan: str = "",
) -> list[str | list[Text]]:
    """A sweep: its settings, the table or the maps, and what was impossible.

    Args:
        common: one of the clusters.
        axes: one or two settings.
        outcomes: of all combinations.
        width: of the terminal.
        glyphs: to draw with.
        plan: of a calibration; else empty.
    """
    shown = (
        _table(outcomes, axes[0], width) if len(axes) == 1 else _maps(outcomes, axes, width, glyphs)
    )
    settings = settings_text(common, plan, axes)
    return [labelled({"settings": settings}, width), shown, _reasons(axes, outcomes, width)]


def clusters_json(
    common: Cluster, axes: Mapping[str, Sequence[Any]], outcomes: Outcomes, plan: str = ""
) -> dict[str, Any]:
    """A sweep as plain values: settings but those of the axes, and a point for each combination."""
    made = settings_json(common, plan)
    for key in axes:
        _take_out(made["settings"], key.split("."))
    points = [
        {
            "at": dict(zip(axes, at, strict=True)),
            **({"impossible": one} if isinstance(one, str) else outcome_json(one, whole=False)),
        }
        for at, one in outcomes.items()
    ]
    return {**made, "axes": axes, "points": points}


def _take_out(values: Any, path: Sequence[str]) -> None:
    for part in path[:-1]:
        values = values.get(part) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values.pop(path[-1], None)


def _reasons(axes: Sequence[str], outcomes: Outcomes, width: int) -> str:
    """Each once, with the first combination that it is said of."""
    found: dict[str, tuple[Any, ...]] = {}
    for at, one in outcomes.items():
        if isinstance(one, str):
            found.setdefault(one, at)
    lines = [
        labelled({IMPOSSIBLE: f"{_named(axes, at)}: {reason}"}, width)
        for reason, at in list(found.items())[:MOST_REASONS]
    ]
    if len(found) > MOST_REASONS:
        lines.append(labelled({IMPOSSIBLE: f"{len(found) - MOST_REASONS} more reasons"}, width))
    return "".join(lines)


def _named(axes: Sequence[str], at: Sequence[Any]) -> str:
    return " ".join(f"{key}={plain(value)}" for key, value in zip(axes, at, strict=True))


def _table(outcomes: Outcomes, axis: str, width: int) -> str:
    """A line for each value of one setting."""
    rows = [_row(one) for one in outcomes.values()]
    columns = {axis: [plain(at[0]) for at in outcomes]}
    columns |= {name: [row[place] for row in rows] for place, name in enumerate(HEADINGS)}
    return table_that_fits(columns, (axis, *RANKED), LEGEND, width)


def _row(outcome: Outcome | str) -> list[str]:
    if isinstance(outcome, str):
        return [*[""] * (len(HEADINGS) - 1), f"{IMPOSSIBLE} impossible"]
    learned = outcome.learned
    step = learned.diverged_at_step
    return [
        f"{outcome.steps_per_hour:,.1f}",
        f"{outcome.staleness.mean:.2f}",
        str(outcome.staleness.p99),
        f"{outcome.rollouts.discarded_share:.1%}",
        f"{outcome.samplers.busy:.1%}",
        f"{outcome.trainers.busy:.1%}",
        f"{learned.reward[-1]:.3f}" if learned.reward else "",
        "no step" if outcome.why_no_step else "" if step is None else f"{AMISS} at {step}",
    ]


def _maps(outcomes: Outcomes, axes: Sequence[str], width: int, glyphs: Glyphs) -> list[Text]:
    """A heat map over two settings for each thing that one wants to know."""
    lines: list[Text] = []
    for name, form in MAPS.items():
        cells = {at: _cell(outcome, name) for at, outcome in outcomes.items()}
        lines += [*heat_map(cells, axes, width, form, glyphs)]
        lines += [*scale_text(cells, name, form, glyphs), Text()]
    return lines


def _cell(outcome: Outcome | str, name: str) -> Cell:
    if isinstance(outcome, str):
        return Cell(None, IMPOSSIBLE)
    values = {
        "steps an hour": outcome.steps_per_hour,
        "mean staleness": outcome.staleness.mean,
        "rollouts discarded, %": 100 * outcome.rollouts.discarded_share,
        "samplers busy, %": 100 * outcome.samplers.busy,
        "trainers busy, %": 100 * outcome.trainers.busy,
    }
    diverged = outcome.learned.diverged_at_step is not None
    return Cell(None if outcome.why_no_step else values[name], AMISS if diverged else "")
