"""A comparison of arms: what each run measured, and how the arms differ from the baseline.

An arm is a recipe with what was changed in it; its runs differ by their seeds. Runs of equal seeds
pair, so what is compared are differences within pairs (`lightning_qrl.analysis.paired`). A run that
failed has no numbers: a policy that came apart would have ended somewhere else. So the means of an
arm with failures are those of the runs that survived, and a note says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_qrl.errors import UserError
from lightning_qrl.reports.arms import Arm, gather
from lightning_qrl.reports.comparison_notes import notes_on
from lightning_qrl.reports.differences import Difference, differences, scaled
from lightning_qrl.reports.measures import (
    HELD_OUT,
    METRICS,
    Goal,
    Measure,
    Rule,
    default_goal,
    further,
    standard,
)
from lightning_qrl.tracking.client import near_names
from lightning_qrl.tracking.notebook import RecordedRun

__all__ = ["Arm", "Comparison", "Difference", "Measure", "compare"]

BASELINES = ("full", "base")  # arms that are the baseline unless another one is named


@dataclass(frozen=True, slots=True)
class Comparison:
    """Arms, side by side.

    Attributes:
        title: what was compared: an experiment, a parent run's name.
        arms: the baseline first.
        measures: columns.
        differences: by an arm's name and a measure's key, of every arm but the baseline.
        notes: what a reader must know before concluding, a sentence each; with one seed a pair,
            that nothing can be concluded.
    """

    title: str
    arms: tuple[Arm, ...]
    measures: tuple[Measure, ...]
    differences: dict[tuple[str, str], Difference]
    notes: tuple[str, ...]

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with."""
        return self.arms[0]


def compare(
    runs: Sequence[RecordedRun],
    *,
    title: str = "",
    metrics: Sequence[str] = (),
    baseline: str | None = None,
    threshold: float | None = None,
) -> Comparison:
    """Sort runs into arms, measure them, and set the arms against the baseline.

    Args:
        runs: with the histories of `measures.METRICS` and of `metrics`, as far as they have them.
        title: what was compared.
        metrics: further metrics to measure.
        baseline: name of an arm; by default one of `BASELINES`, else the one started first.
        threshold: held-out reward for "steps to"; by default `measures.default_goal`.

    Raises:
        UserError: no run has ended, there is no such arm, or there is nothing to measure.
    """
    arms, said = gather(runs)
    if not arms:
        raise UserError(f"nothing to compare: no run of {title or 'these'} has ended yet")
    arms = _baseline_first(arms, baseline)
    finished = [run for arm in arms for run in arm.finished.values()]
    logged = {name for run in finished for name in run.metrics}
    goal = _default_goal(arms[0]) if threshold is None else Goal(threshold, "")
    rules = standard(logged, goal)
    rules += [rule for metric in metrics if metric in logged for rule in further(metric)]
    if finished and not rules:
        raise UserError(
            f"nothing to compare: the finished runs of {title or 'these'} have none of the metrics "
            f"{', '.join(METRICS)}; --metric names others"
        )
    arms = [_measured(arm, rules) for arm in arms]
    measures = [scaled(rule.measure, arms) for rule in rules]
    found = {
        (arm, measure.key): difference
        for measure in measures
        for arm, difference in differences(arms, measure).items()
    }
    notes = (*notes_on(arms, measures, found), *said)
    return Comparison(title, tuple(arms), tuple(measures), found, notes)


def _default_goal(base: Arm) -> Goal | None:
    runs = base.finished.values()
    return default_goal([run.metrics[HELD_OUT] for run in runs if HELD_OUT in run.metrics])


def _baseline_first(arms: list[Arm], named: str | None) -> list[Arm]:
    names = [arm.name for arm in arms]
    if named is not None and named not in names:
        raise UserError(f"--baseline {named}: there is no such arm; {near_names(named, names)}")
    chosen = named or next((name for name in BASELINES if name in names), names[0])
    return sorted(arms, key=lambda arm: arm.name != chosen)


def _measured(arm: Arm, rules: Sequence[Rule]) -> Arm:
    values: dict[str, dict[int, float]] = {}
    for rule in rules:
        own = values[rule.measure.key] = {}
        for seed, run in arm.finished.items():
            value = rule.of(run.metrics[rule.metric]) if rule.metric in run.metrics else None
            if value is not None and math.isfinite(value):
                own[seed] = value
    return replace(arm, values=values)
