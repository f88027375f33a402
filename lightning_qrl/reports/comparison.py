"""A comparison of arms: what each run measured, and how the arms differ from the baseline.

An arm is a recipe with what was changed in it; its runs differ by their seeds. Runs of equal seeds
pair, so what is compared are differences within pairs (`lightning_qrl.analysis.paired`). A run that
failed has no numbers: a policy that came apart would have ended somewhere else. So the means of an
arm with failures are those of the runs that survived, and a note says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_qrl.errors import UserError
from lightning_qrl.reports.arms import Arm, gather
from lightning_qrl.reports.comparison_notes import notes_on
from lightning_qrl.reports.differences import Difference, differences, scaled
from lightning_qrl.reports.measures import (
    HELD_OUT,
    METRICS,
    NORM,
    Goal,
    Measure,
    Rule,
    default_goal,
    further,
    standard,
)
from lightning_qrl.reports.planned import in_order, on_unfinished, read_design, references
from lightning_qrl.tracking.client import near_names
from lightning_qrl.tracking.notebook import RecordedRun

__all__ = ["Arm", "Comparison", "Difference", "Measure", "compare"]


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
        references: by an arm's name, what it is compared with where that is not the baseline.
    """

    title: str
    arms: tuple[Arm, ...]
    measures: tuple[Measure, ...]
    differences: dict[tuple[str, str], Difference]
    notes: tuple[str, ...]
    references: Mapping[str, Arm] = field(default_factory=dict)

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with, unless they have a reference of their own."""
        return self.arms[0]

    def reference(self, arm: Arm) -> Arm:
        """What an arm is compared with; of the baseline, itself."""
        return self.references.get(arm.name, self.baseline)


def compare(
    runs: Sequence[RecordedRun],
    *,
    title: str = "",
    metrics: Sequence[str] = (),
    baseline: str | None = None,
    threshold: float | None = None,
    design: str = "",
) -> Comparison:
    """Sort runs into arms, measure them, and set the arms against the baseline.

    Args:
        runs: with the histories of `measures.METRICS` and of `metrics`, as far as they have them.
        title: what was compared.
        metrics: further metrics to measure.
        baseline: name of an arm, for all to be compared with; by default see `planned`.
        threshold: held-out reward for "steps to"; by default `measures.default_goal`.
        design: of the ablation that the runs are of, as JSON.

    Raises:
        UserError: no run has ended, there is no such arm, or there is nothing to measure.
    """
    arms, said = gather(runs)
    if not arms:
        raise UserError(f"nothing to compare: no run of {title or 'these'} has ended yet")
    planned = read_design(design)
    arms = _baseline_first(in_order(arms, planned), baseline)
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
    compared = references(arms, None if baseline else planned)
    found = {
        (arm, measure.key): difference
        for measure in measures
        for arm, difference in differences(arms, compared, measure).items()
    }
    said += _by_difference(rules, measures)
    notes = (*on_unfinished(arms, planned), *notes_on(arms, measures, found, compared), *said)
    own = {name: arm for name, arm in compared.items() if arm is not arms[0]}
    return Comparison(title, tuple(arms), tuple(measures), found, notes, own)


def _default_goal(base: Arm) -> Goal | None:
    runs = base.finished.values()
    return default_goal([run.metrics[HELD_OUT] for run in runs if HELD_OUT in run.metrics])


def _baseline_first(arms: list[Arm], named: str | None) -> list[Arm]:
    names = [arm.name for arm in arms]
    if named is None:
        return arms
    if named not in names:
        raise UserError(f"--baseline {named}: there is no such arm; {near_names(named, names)}")
    return sorted(arms, key=lambda arm: arm.name != named)


def _by_difference(rules: Sequence[Rule], measures: Sequence[Measure]) -> list[str]:
    labels = [
        measure.label
        for rule, measure in zip(rules, measures, strict=True)
        if measure.scale != rule.measure.scale
    ]
    what = f"{', '.join(labels)} {'is' if len(labels) == 1 else 'are'}"
    return [f"{what} compared by difference, not by ratio: of a run it is 0."] if labels else []


def _diverged(rule: Rule, value: float) -> bool:
    """An infinite gradient norm is a value: that of a run that came apart."""
    return rule.metric == NORM and value == math.inf


def _measured(arm: Arm, rules: Sequence[Rule]) -> Arm:
    values: dict[str, dict[int, float]] = {}
    for rule in rules:
        own = values[rule.measure.key] = {}
        for seed, run in arm.finished.items():
            value = rule.of(run.metrics[rule.metric]) if rule.metric in run.metrics else None
            if value is not None and (math.isfinite(value) or _diverged(rule, value)):
                own[seed] = value
    return replace(arm, values=values)
