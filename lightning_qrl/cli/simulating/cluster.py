"""`qrl simulate --cluster`: samplers and trainers of any number, in seconds and GPU-hours."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_qrl.cli.simulating.assignments import read_assignments, read_axes
from lightning_qrl.cli.simulating.base import impossible
from lightning_qrl.cli.simulating.fitted_cluster import find_calibration, fitted_values, predicted
from lightning_qrl.cli.simulating.showing import Screen, first_notes, show_json, waiting
from lightning_qrl.errors import UserError

if TYPE_CHECKING:
    from lightning_qrl.simulator.calibrated import Calibration
    from lightning_qrl.simulator.cluster import Cluster, Headroom, Outcome


def show_cluster(
    overrides: Sequence[str],
    file: Path | None,
    fitted: Path | None,
    sweep: Sequence[str],
    margin: float | None,
    *,
    as_json: bool,
) -> None:
    """Simulate a cluster, or several, and print what came of it."""
    axes = read_axes(sweep)
    if len(axes) > 2:
        raise UserError(f"--sweep takes one or two settings, got {', '.join(axes)}; fix the others")
    if axes and margin is not None:
        raise UserError("--margin does nothing with --sweep; take it out")
    given = read_assignments(overrides)
    calibration, plan = find_calibration(fitted, given)
    _check_margin(margin, calibration)
    values = _values(given, file)
    if calibration is not None:
        values = _merge(fitted_values(calibration, plan, values), values)
    if axes:
        _sweep(values, axes, calibration, plan, as_json=as_json)
        return
    cluster = _make(values)
    with waiting("simulating"):
        outcome = _run(cluster, calibration, plan)
        headroom = None if margin is None else _headroom(cluster, margin)
    if as_json:
        _show_json(outcome, headroom)
        return
    from lightning_qrl.reports.simulation_cluster import cluster_text, headroom_text

    screen = Screen()
    screen.show(cluster_text(cluster, outcome, screen.width, screen.glyphs))
    if headroom is not None:
        screen.show(headroom_text(headroom, screen.width))
    _show_notes(screen, [outcome.notes])


def _values(given: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """What a file says, under KEY=VALUE."""
    if file is None:
        return dict(given)
    from lightning_qrl.recipe import read_mapping

    below = read_mapping(file)
    if isinstance(below.get("samplers"), list) and "samplers" in given:
        raise UserError(f"samplers: {file} has a list of pools; change them there")
    return _merge(below, given)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    from lightning_qrl.recipe import merge

    merged: dict[str, Any] = merge(dict(below), dict(above))
    return merged


def _make(values: Mapping[str, Any]) -> "Cluster":
    from lightning_qrl.simulator.cluster import Cluster

    with impossible():
        return Cluster.from_mapping(values)


def _run(cluster: "Cluster", calibration: "Calibration | None", plan: str) -> "Outcome":
    from lightning_qrl.simulator.cluster import run

    outcome = run(cluster)
    if calibration is None or not outcome.steps:
        return outcome
    return predicted(cluster, outcome, calibration, plan)


def _headroom(cluster: "Cluster", margin: float) -> "Headroom":
    from lightning_qrl.simulator.cluster import largest_stable_staleness

    with impossible():
        return largest_stable_staleness(cluster, margin)


def _check_margin(margin: float | None, calibration: "Calibration | None") -> None:
    if margin is None:
        return
    if not 0 <= margin < math.inf:
        raise UserError(f"--margin must be at least 0, got {margin}")
    if calibration is not None and not calibration.parts["drift"].taken:
        raise UserError(
            "--margin: the calibration does not identify drift, so no limit of stability follows "
            "from it; take one of them out"
        )


def _sweep(
    values: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    calibration: "Calibration | None",
    plan: str,
    *,
    as_json: bool,
) -> None:
    clusters = {at: _make(_at(values, axes, at)) for at in product(*axes.values())}
    with waiting(f"simulating {len(clusters)} clusters"):
        outcomes = {at: _run(one, calibration, plan) for at, one in clusters.items()}
    from lightning_qrl.reports import simulation_cluster as report

    if as_json:
        points = [
            {"at": dict(zip(axes, at, strict=True)), **report.outcome_json(one, whole=False)}
            for at, one in outcomes.items()
        ]
        show_json({"axes": axes, "points": points})
        return
    screen, names = Screen(), list(axes)
    if len(names) == 1:
        screen.show(report.cluster_table(outcomes, names[0]))
    else:
        screen.show(report.cluster_maps(outcomes, names, screen.width, screen.glyphs))
    _show_notes(screen, [outcome.notes for outcome in outcomes.values()])


def _show_notes(screen: Screen, notes: Sequence[Sequence[str]]) -> None:
    from lightning_qrl.reports.simulation import labelled

    for note in first_notes(notes):
        screen.show(labelled({"note": note}, screen.width))


def _at(
    values: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], at: Sequence[Any]
) -> dict[str, Any]:
    """Settings at one point of a grid."""
    made = dict(values)
    for key, value in zip(axes, at, strict=True):
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        made = _merge(made, nested)
    return made


def _show_json(outcome: "Outcome", headroom: "Headroom | None") -> None:
    from lightning_qrl.reports.simulation_cluster import outcome_json

    made = outcome_json(outcome)
    if headroom is not None:
        made["headroom"] = asdict(headroom)
    show_json(made)
