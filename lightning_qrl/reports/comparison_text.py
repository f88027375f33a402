"""A comparison for the terminal."""

from collections.abc import Iterator, Sequence
from textwrap import TextWrapper

from lightning_qrl.reports.comparison import Arm, Comparison, Measure
from lightning_qrl.reports.numbers import difference_text, plain, shortened, value_text
from lightning_qrl.reports.tables import text_table

WIDTH = 116  # of a table, in characters
NAME = 40  # of an arm's name
Column = list[str]  # a heading, then a cell an arm


def comparison_text(comparison: Comparison) -> str:
    """Tables of arms, as many measures abreast as fit; then what failed, and the notes."""
    arms = comparison.arms
    names = [shortened(arm.name, NAME) for arm in arms]
    named = [["arm", *names], ["seeds", *(str(len(arm.runs)) for arm in arms)]]
    parts = [f"{plain(comparison.title)}\n"]
    for block in _blocks([_columns(comparison, m) for m in comparison.measures], _width(named)):
        headings, *rows = zip(*named, *block, strict=True)
        parts.append(text_table(headings, rows))
    failed = [
        f"failed  {plain(arm.name)}, seed {seed}: {plain(error)}\n"
        for arm in arms
        for seed, error in arm.errors.items()
    ]
    wrapper = TextWrapper(WIDTH, initial_indent="- ", subsequent_indent="  ")
    notes = [f"{wrapper.fill(plain(note))}\n" for note in comparison.notes]
    parts += ["".join(lines) for lines in (failed, notes) if lines]
    return "\n".join(parts)


def _columns(comparison: Comparison, measure: Measure) -> list[Column]:
    """Values, and differences if there is an arm to have one."""
    label = f"{measure.label} ({measure.unit})" if measure.unit else measure.label
    values = [label, *(_value(arm, measure) for arm in comparison.arms)]
    if len(comparison.arms) == 1:
        return [values]
    return [values, ["difference", "", *(_difference(comparison, a, measure)
                                         for a in comparison.arms[1:])]]  # fmt: skip


def _value(arm: Arm, measure: Measure) -> str:
    values = list(arm.values[measure.key].values())
    known = len(arm.known(measure.key))
    some = f" ({known} of {len(arm.runs)})" if 0 < known < len(arm.runs) else ""
    return value_text(measure, values) + some


def _difference(comparison: Comparison, arm: Arm, measure: Measure) -> str:
    """With a star where it is marked, else a space, so that brackets stay below one another."""
    difference = comparison.differences[arm.name, measure.key]
    return difference_text(measure, difference) + ("*" if difference.marked else " ")


def _blocks(measures: Sequence[list[Column]], taken: int) -> Iterator[list[Column]]:
    """Columns of measures that fit beside each other; at least one measure's."""
    block: list[Column] = []
    for columns in measures:
        if block and taken + _width([*block, *columns]) > WIDTH:
            yield block
            block = []
        block = [*block, *columns]
    if block:
        yield block


def _width(columns: Sequence[Column]) -> int:
    return sum(max(map(len, column)) + 2 for column in columns)
