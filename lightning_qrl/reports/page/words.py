"""What the page says: numbers as texts, and the result in a paragraph.

It is said that an arm differs where the comparison marks it, and of no arm that it does not differ:
an interval that holds zero tells how large a difference may still be.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from lightning_qrl.reports.comparison import Arm, Comparison, Difference
from lightning_qrl.reports.measures import Measure
from lightning_qrl.reports.page.look import plain

MANY = 700.0  # its exponential is as large as a float may be
VERDICTS = {"worse": "worse than", "better": "better than", "differs": "different from"}


def value_text(measure: Measure, values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds (of sample, ddof 1)."""
    if not values:
        return "–"
    mean = sum(values) / len(values)
    if len(values) == 1 or not math.isfinite(mean):
        return measure.form.format(mean)
    apart = math.hypot(*(value - mean for value in values))  # unlike a sum, does not overflow
    deviation = apart / math.sqrt(len(values) - 1)
    return f"{measure.form.format(mean)} ± {measure.form.format(deviation)}"


def difference_text(measure: Measure, difference: Difference | None) -> str:
    """Mean and interval: ``+0.012 [−0.003, +0.027]``, of a ratio ``×1.30 [1.10, 1.54]``."""
    if difference is None or math.isnan(difference.mean):
        return "no pair"
    middle, low, high = (
        _signed(measure, value) for value in (difference.mean, difference.low, difference.high)
    )
    if math.isnan(difference.low) or math.isnan(difference.high):
        return middle
    return f"{middle} [{low.lstrip('×')}, {high.lstrip('×')}]"


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
    said.append(f"baseline {plain(comparison.baseline.name)}")
    if every:
        first, last = min(run.started for run in every), max(r.ended or r.started for r in every)
        said.append(f"{when(first)} to {when(last)} UTC")
    return said


def result(comparison: Comparison) -> list[str]:
    """The result in words: on the first measure, and on each other in which an arm is marked."""
    arms, first = comparison.arms[1:], comparison.measures[:1]
    if not arms or not first:
        return ["There is one arm, so there is nothing to compare it with."]
    measure, base = first[0], plain(comparison.baseline.name)
    found = {arm.name: comparison.differences.get((arm.name, measure.key)) for arm in arms}
    said = []
    values = list(comparison.baseline.values.get(measure.key, {}).values())
    if values:
        said.append(f"The baseline, {base}, has {measure.label} {value_text(measure, values)}.")
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
        said += [f"In {measure.label}, {than} the baseline: {_listed(own)}."] if own else []
    if not marked:
        said.append(f"In {measure.label}, no arm is shown to differ from the baseline.")
    if rest:
        low, high = min(d.low for d in rest), max(d.high for d in rest)
        which = "arm" if len(rest) == 1 else f"{len(rest)} arms"
        which = f"other {which}" if marked else which
        said.append(
            f"That the {which} {'differs' if len(rest) == 1 else 'differ'} is not shown, nor that "
            f"{'it does' if len(rest) == 1 else 'they do'} not: the 95% "
            f"{'interval goes' if len(rest) == 1 else 'intervals go'} from {_signed(measure, low)} "
            f"to {_signed(measure, high)}."
        )
    return said


def _marked_names(comparison: Comparison, measure: Measure) -> str:
    own = [
        (arm.name, verdict(measure, comparison.differences.get((arm.name, measure.key))))
        for arm in comparison.arms[1:]
    ]
    marked = [f"{plain(name)} ({word})" for name, word in own if word]
    return f"{measure.label[:1].upper()}{measure.label[1:]}: {_listed(marked)}." if marked else ""


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _signed(measure: Measure, value: float) -> str:
    if measure.scale == "ratio":
        return f"×{math.exp(value):#.3g}".rstrip(".") if value < MANY else "×∞"
    return measure.form.replace("{:", "{:+", 1).format(value).replace("-", "−")


def when(seconds: float) -> str:
    """A moment as ``2026-11-30 16:40`` in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
