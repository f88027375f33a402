"""`qrl simulate --cluster`: samplers and trainers of any number, in seconds and GPU-hours."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning_qrl.cli.simulating.assignments import read_assignments, read_axes
from lightning_qrl.cli.simulating.base import impossible
from lightning_qrl.cli.simulating.fitted_cluster import (
    find_calibration,
    fitted_values,
    notes_on_margin,
    predicted,
)
from lightning_qrl.cli.simulating.settings_file import read_settings
from lightning_qrl.cli.simulating.showing import Screen, first_notes, show_json, waiting
from lightning_qrl.errors import UserError

if TYPE_CHECKING:
    from lightning_qrl.simulator.calibrated import Calibration
    from lightning_qrl.simulator.cluster import Cluster, Headroom, Outcome

MOST_SECONDS = 600.0  # of a sweep
KEY = re.compile(r"[\w.]*\w")  # at the beginning of a message


def show_cluster(
    overrides: Sequence[str],
    file: Path | None,
    recipe: str | None,
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
    if recipe is not None and fitted is not None:
        raise UserError(
            "--recipe and --calibration both say how long things take; take one of them out"
        )
    calibration, plan = find_calibration(fitted, given)
    _check_margin(margin, calibration)
    values = _values(given, file)
    if recipe is not None:
        from lightning_qrl.cli.simulating.recipe_cluster import recipe_cluster

        of_recipe, notes = recipe_cluster(recipe)
        values = replace(values, all=_merge(of_recipe, values.all), notes=notes)
    if calibration is not None:
        values = replace(values, below=partial(fitted_values, calibration, plan))
    if axes:
        _sweep(values, axes, calibration, plan, as_json=as_json)
        return
    cluster = values.cluster()
    with waiting("simulating"):
        outcome = values.noted(_run(cluster, calibration, plan))
        headroom = None if margin is None else _headroom(cluster, margin)
    if headroom is not None:
        outcome = replace(outcome, notes=(*outcome.notes, *notes_on_margin(calibration)))
    if as_json:
        _show_json(cluster, plan, outcome, headroom)
        return
    from lightning_qrl.reports.simulation_cluster import cluster_text, headroom_text

    screen = Screen()
    screen.show(cluster_text(cluster, outcome, screen.width, screen.glyphs, plan))
    if headroom is not None:
        screen.show(headroom_text(headroom, screen.width))
    _show_notes(screen, [outcome.notes])


@dataclass(frozen=True, slots=True)
class _Values:
    """Settings of a cluster.

    Attributes:
        all: merged.
        file: that some are from.
        above: dotted keys that are not the file's.
        notes: on what they hold for.
        below: makes what settings are laid over, of them.
    """

    all: dict[str, Any]
    file: Path | None
    above: frozenset[str]
    notes: tuple[str, ...] = ()
    below: "Callable[[Mapping[str, Any]], dict[str, Any]] | None" = None

    def noted(self, outcome: "Outcome") -> "Outcome":
        """An outcome with the notes."""
        return replace(outcome, notes=(*self.notes, *outcome.notes))

    def tried(
        self, axes: Mapping[str, Sequence[Any]] = MappingProxyType({}), at: Sequence[Any] = ()
    ) -> "Cluster | str":
        """A cluster at a point of a grid that can be simulated, or why it is none."""
        from lightning_qrl.simulator.cluster import Cluster
        from lightning_qrl.simulator.cluster.workload import check_workload

        try:
            made = _at(self.all, axes, at)
            cluster = Cluster.from_mapping(_merge(self.below(made), made) if self.below else made)
            check_workload(cluster)
        except ValueError as error:
            key = KEY.match(str(error))
            elsewhere = self.file is None or (key and key[0] in {*self.above, *axes})
            return str(error) if elsewhere else f"{self.file}: {error}"
        return cluster

    def check_axes(self, axes: Mapping[str, Sequence[Any]]) -> None:
        """Raise UserError where an axis is set besides, or leads into a list of pools."""
        for key in axes:
            if key in self.above:
                raise UserError(f"--sweep {key}: KEY=VALUE says it too; take one of them out")
            if key.startswith("samplers.") and isinstance(self.all.get("samplers"), list):
                raise UserError(f"--sweep {key}: {self.file} has a list of pools; sweep another")

    def cluster(self) -> "Cluster":
        """The cluster; a UserError where it is impossible."""
        made = self.tried()
        if isinstance(made, str):
            raise UserError(made)
        return made


def _values(given: Mapping[str, Any], file: Path | None) -> _Values:
    """What a file says, under KEY=VALUE."""
    above = frozenset(_keys(given))
    if file is None:
        return _Values(dict(given), None, above)
    below = read_settings(file)
    if isinstance(below.get("samplers"), list) and "samplers" in given:
        raise UserError(f"samplers: {file} has a list of pools; change them there")
    return _Values(_merge(below, given), file, above)


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    from lightning_qrl.recipe import merge

    merged: dict[str, Any] = merge(dict(below), dict(above))
    return merged


def _run(cluster: "Cluster", calibration: "Calibration | None", plan: str) -> "Outcome":
    from lightning_qrl.simulator.cluster import run

    with impossible():
        outcome = run(cluster)
    if calibration is None:
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
    values: "_Values",
    axes: Mapping[str, Sequence[Any]],
    calibration: "Calibration | None",
    plan: str,
    *,
    as_json: bool,
) -> None:
    values.check_axes(axes)
    clusters = {at: values.tried(axes, at) for at in product(*axes.values())}
    possible = {at: one for at, one in clusters.items() if not isinstance(one, str)}
    if not possible:
        raise UserError(str(next(iter(clusters.values()))))
    _check_together(list(possible.values()))
    outcomes: dict[tuple[Any, ...], Outcome | str] = {}
    with waiting(f"simulating {len(possible)} clusters"):
        for at, one in clusters.items():
            outcomes[at] = (
                one if isinstance(one, str) else values.noted(_run(one, calibration, plan))
            )
    from lightning_qrl.reports import simulation_clusters as report

    common = next(iter(possible.values()))
    if as_json:
        show_json(report.clusters_json(common, axes, outcomes, plan))
        return
    screen = Screen()
    names, width, glyphs = list(axes), screen.width, screen.glyphs
    screen.show(*report.clusters_text(common, names, outcomes, width, glyphs, plan))
    _show_notes(screen, [one.notes for one in outcomes.values() if not isinstance(one, str)])


def _check_together(clusters: "Sequence[Cluster]") -> None:
    """Raise UserError where a whole sweep would take long, though none of its runs does."""
    from lightning_qrl.simulator.cluster.workload import workload

    seconds = sum(workload(one).seconds for one in clusters)
    if seconds > MOST_SECONDS:
        raise UserError(
            f"--sweep: {len(clusters)} clusters take about {seconds / 60:,.0f} minutes to simulate "
            f"({MOST_SECONDS / 60:.0f} are the most); lower duration, or take fewer values"
        )


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


def _show_json(
    cluster: "Cluster", plan: str, outcome: "Outcome", headroom: "Headroom | None"
) -> None:
    from lightning_qrl.reports.simulation_cluster import outcome_json, settings_json

    made = {**settings_json(cluster, plan), **outcome_json(outcome)}
    if headroom is not None:
        made["headroom"] = asdict(headroom)
    show_json(made)
