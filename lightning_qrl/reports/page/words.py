"""What the page says: the result in sentences.

It is said that an arm differs where the comparison marks it, and of no arm that it does not differ:
an interval that holds zero tells how large a difference may still be.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from lightning_qrl.reports.comparison import Arm, Comparison, Difference
from lightning_qrl.reports.measures import Measure
from lightning_qrl.reports.numbers import difference_text, plain, signed, value_text

SHOWN = 5  # arms that a sentence names
VERDICTS = {"worse": "worse than", "better": "better than", "differs": "different from"}


def verdict(measure: Measure, difference: Difference | None) -> str:
    """``better``, ``worse`` or ``differs`` of a marked difference; else empty."""
    if difference is None or not difference.marked:
        return ""
    if measure.better is None:
        return "differs"
    return "better" if (difference.mean > 0) == (measure.better == "higher") else "worse"


def facts(comparison: Comparison) -> list[str]:
    """How much was compared, and when it was made."""
    arms = comparison.arms
    counts = sorted({len(arm.runs) for arm in arms})
    every = [run for arm in arms for run in arm.runs.values()]
    failed = sum(len(arm.errors) for arm in arms)
    said = [f"{len(arms)} arm{'s' if len(arms) != 1 else ''}"]
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    said.append(f"{seeds} seed{'s' if seeds != '1' else ''} an arm")
    said.append(f"{len(every)} run{'s' if len(every) != 1 else ''}")
    said += [f"{failed} failed"] if failed else []
    stopped = sum(len(arm.interrupted) for arm in arms)
    said += [f"{stopped} interrupted"] if stopped else []
    said.append(f"baseline {plain(comparison.baseline.name)}")
    if every:
        first, last = min(run.started for run in every), max(r.ended or r.started for r in every)
        said.append(f"{when(first)} to {when(last)} UTC")
    return said


def result(comparison: Comparison) -> list[str]:
    """The result in words: on the first measure, and on each other in which an arm is marked."""
    arms, first = comparison.arms[1:], comparison.measures[:1]
    if not first:
        return ["No run finished, so there is nothing to compare."]
    if not arms:
        return ["There is one arm, so there is nothing to compare it with."]
    measure, base = first[0], plain(comparison.baseline.name)
    found = {arm.name: comparison.differences.get((arm.name, measure.key)) for arm in arms}
    said = []
    values = list(comparison.baseline.values.get(measure.key, {}).values())
    if values:
        said.append(f"The baseline, {base}, has {measure.label} {value_text(measure, values)}.")
    else:
        said.append(f"Of the baseline, {base}, there is no {measure.label}.")
    if all(d is None or d.pairs < 2 or math.isnan(d.low) for d in found.values()):
        said.append(
            "No arm has two seeds in common with the baseline, so nothing can be concluded about "
            f"{measure.label}."
        )
    else:
        said += _about(measure, arms, comparison)
    others = (_marked_names(comparison, other) for other in comparison.measures[1:])
    return said + [other for other in others if other]


def _about(measure: Measure, arms: Sequence[Arm], comparison: Comparison) -> list[str]:
    found = [(arm.name, comparison.differences.get((arm.name, measure.key))) for arm in arms]
    marked = [(name, d) for name, d in found if d is not None and d.marked]
    rest = [d for _, d in found if d is not None and not d.marked and math.isfinite(d.low)]
    said = []
    for word, than in VERDICTS.items():
        own = [
            f"{plain(name)} {difference_text(measure, d)}"
            for name, d in sorted(marked, key=lambda pair: -abs(pair[1].mean))
            if verdict(measure, d) == word
        ]
        said += [f"In {measure.label}, {than} {_base(comparison)}: {_listed(own)}."] if own else []
    if rest:
        low, high = min(d.low for d in rest), max(d.high for d in rest)
        one = len(rest) == 1
        intervals = (
            f"{'interval' if one else 'intervals'}, from {signed(measure, low)} to "
            f"{signed(measure, high)}, {'says' if one else 'say'} what differences remain possible."
        )
        who = "The other arm is not" if one else f"None of the other {len(rest)} arms is"
        if marked:
            said.append(f"{who} shown to differ: {'its' if one else 'their'} {intervals}")
        else:
            said.append(f"No arm is shown to differ from {_base(comparison)} in {measure.label}. "
                        f"The {intervals}")  # fmt: skip
    return said


def _base(comparison: Comparison) -> str:
    """What arms are compared with, in a sentence."""
    return "the full arm of the same factors" if comparison.references else "the baseline"


def _marked_names(comparison: Comparison, measure: Measure) -> str:
    own = [
        (arm.name, found)
        for arm in comparison.arms[1:]
        if (found := comparison.differences.get((arm.name, measure.key))) and found.marked
    ]
    own.sort(key=lambda pair: -abs(pair[1].mean))
    marked = [f"{plain(name)} ({verdict(measure, found)})" for name, found in own]
    return f"{measure.label[:1].upper()}{measure.label[1:]}: {_listed(marked)}." if marked else ""


def _listed(texts: Sequence[str]) -> str:
    if len(texts) > SHOWN + 1:
        return f"{', '.join(texts[:SHOWN])} and {len(texts) - SHOWN} more, see the table"
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def when(seconds: float) -> str:
    """A moment as ``2026-11-30 16:40`` in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
