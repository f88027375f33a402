"""The tables of the page, as plain values that its template lays out."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_qrl.reports.comparison import Arm, Comparison
from lightning_qrl.reports.live import duration
from lightning_qrl.reports.measures import Measure
from lightning_qrl.reports.numbers import difference_text, value_text
from lightning_qrl.reports.page.words import verdict, when
from lightning_qrl.tracking import tags
from lightning_qrl.tracking.notebook import RecordedRun

ABREAST = 4  # measures of a table: as many as fit on paper
CONTEXT = 2  # unchanged lines around a change
APART = ("seed:", "tracking:")  # of a recipe: they differ from run to run by design
OF_ONE_RUN = {  # tags that say which run it is, and not what it ran on
    tags.RECIPE, tags.RECIPE_HASH, tags.SEED, tags.FOLDER, tags.ERROR, tags.POLICY_SHA256,
    tags.RESUMED_FROM, tags.RERUN_OF, tags.DESIGN, tags.PARENT, tags.ARM, tags.REMOVED,
    tags.REPLACED_BY, tags.KIND, "qrl.plan",
}  # fmt: skip
FOREIGN = ("mlflow.source.git.commit", "mlflow.source.name", "mlflow.user")


@dataclass(frozen=True, slots=True)
class Cell:
    """An arm in a measure."""

    value: str
    seeds: int  # that have a value
    missing: bool  # whether some of the arm's seeds have none
    difference: str  # empty for the baseline
    verdict: str


@dataclass(frozen=True, slots=True)
class Block:
    """Some measures of all arms."""

    measures: tuple[Measure, ...]
    rows: tuple[tuple[Arm, tuple[Cell, ...]], ...]


def blocks(comparison: Comparison) -> list[Block]:
    """The table of arms, in blocks of as many measures as fit beside each other."""
    measures = comparison.measures
    tables = -(-len(measures) // ABREAST)
    size = -(-len(measures) // max(1, tables))  # none has much fewer than the others
    cut = [measures[i : i + size] for i in range(0, len(measures), size or 1)]
    return [
        Block(own, tuple((arm, tuple(_cells(comparison, arm, own))) for arm in comparison.arms))
        for own in cut
    ]


def _cells(comparison: Comparison, arm: Arm, measures: Sequence[Measure]) -> Iterator[Cell]:
    for measure in measures:
        values = list(arm.values.get(measure.key, {}).values())
        found = comparison.differences.get((arm.name, measure.key))
        is_baseline = arm is comparison.baseline
        yield Cell(
            value_text(measure, values),
            len(arm.known(measure.key)),
            len(arm.known(measure.key)) < len(arm.runs),
            "" if is_baseline else difference_text(measure, found),
            verdict(measure, found),
        )


def failures(comparison: Comparison) -> list[tuple[Arm, int, RecordedRun, str]]:
    """Arm, seed, run and error of what failed."""
    return [
        (arm, seed, arm.runs[seed], error)
        for arm in comparison.arms
        for seed, error in sorted(arm.errors.items())
    ]


def runs(comparison: Comparison) -> list[tuple[Arm, int, RecordedRun, str, str]]:
    """Arm, seed and run, when it started and how long it took."""
    return [
        (arm, seed, run, when(run.started), _length(run))
        for arm in comparison.arms
        for seed, run in arm.runs.items()
    ]


def _length(run: RecordedRun) -> str:
    return "" if run.ended is None else duration(run.ended - run.started)


def recipe_changes(comparison: Comparison) -> list[tuple[str, list[tuple[str, str]]]]:
    """Of each arm but the baseline, the lines of its recipe's difference, each with its kind.

    Kinds are ``add``, ``drop``, ``place`` (which lines follow) and ``same``; an arm that has no
    line has the baseline's recipe, and one whose recipe is not known is left out.
    """
    before = _recipe(comparison.baseline)
    if before is None:
        return []
    changes = []
    for arm in comparison.arms[1:]:
        after = _recipe(arm)
        if after is not None:
            lines = list(difflib.unified_diff(before, after, lineterm="", n=CONTEXT))[2:]
            changes.append((arm.name, [(_kind(line), line) for line in lines]))
    return changes


def _recipe(arm: Arm) -> list[str] | None:
    """The lines of an arm's recipe, without what differs from run to run."""
    texts = [run.texts["recipe.yaml"] for run in arm.runs.values() if "recipe.yaml" in run.texts]
    if not texts:
        return None
    kept, dropping = [], False
    for line in texts[0].splitlines():
        if line and not line[0].isspace():
            dropping = line.startswith(APART)
        if not dropping:
            kept.append(line)
    return kept


def _kind(line: str) -> str:
    return {"+": "add", "-": "drop", "@": "place"}.get(line[:1], "same")


def plans(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Each plan, and the arms that have it."""
    found: dict[str, dict[str, None]] = {}
    for arm in comparison.arms:
        for run in arm.runs.values():
            if "plan.txt" in run.texts:
                found.setdefault(run.texts["plan.txt"], {})[arm.name] = None
    return [(text, list(names)) for text, names in found.items()]


def environment(comparison: Comparison) -> list[tuple[str, list[tuple[str, str]]]]:
    """Of each tag on what the runs ran on, its values, and which runs have each.

    The commonest value comes first, and its runs are not named. Tags with several come first.
    """
    every = [(arm, seed, run) for arm in comparison.arms for seed, run in arm.runs.items()]
    names = sorted({name for _, _, run in every for name in run.tags if _of_environment(name)})
    table = []
    for name in names:
        having: dict[str, list[tuple[str, int]]] = {}
        for arm, seed, run in every:
            having.setdefault(run.tags.get(name, "not recorded"), []).append((arm.name, seed))
        common = max(having, key=lambda value: len(having[value]))
        values = [(value, _named(own)) for value, own in having.items() if value != common]
        table.append((name.removeprefix("qrl."), [(common, ""), *values]))
    return sorted(table, key=lambda row: len(row[1]) == 1)


def _of_environment(name: str) -> bool:
    return name in FOREIGN or (name.startswith("qrl.") and name not in OF_ONE_RUN)


def _named(pairs: Sequence[tuple[str, int]]) -> str:
    """``full: seeds 0, 1; empty: seed 2``."""
    said = []
    for arm, own in groupby(pairs, key=lambda pair: pair[0]):
        seeds = [str(seed) for _, seed in own]
        said.append(f"{arm}: seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
    return "; ".join(said)
