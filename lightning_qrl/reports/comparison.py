"""A comparison of arms: what each run measured, and how the arms differ from the baseline.

An arm is a recipe with what was changed in it; its runs differ by their seeds. Runs of equal seeds
pair, so what is compared are differences within pairs.
"""

from dataclasses import dataclass
from typing import Literal

from lightning_qrl.tracking.notebook import RecordedRun


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a run.

    Attributes:
        key: its name in JSON and CSV, such as ``held_out_reward``.
        label: its name for people, such as ``held-out reward``.
        unit: empty where it has none.
        better: which way is an improvement; None where neither is.
        form: a format for one value, such as ``{:.3f}``.
        about: one line on how it is made of the logged metrics.
    """

    key: str
    label: str
    unit: str
    better: Literal["higher", "lower"] | None
    form: str
    about: str


@dataclass(frozen=True, slots=True)
class Difference:
    """How an arm differs from the baseline in one measure, over the seeds that both have.

    Attributes:
        pairs: number of seeds.
        mean: of the differences arm - baseline; NaN without pairs.
        low: lower end of the 95% bootstrap interval; NaN with fewer than two pairs.
        high: its upper end.
        p: two-sided, of a paired t-test; NaN with fewer than two pairs.
        p_holm: the same, corrected for the number of arms that are compared (Holm 1979).
        marked: whether the interval excludes zero and ``p_holm`` is below 0.05.
    """

    pairs: int
    mean: float
    low: float
    high: float
    p: float
    p_holm: float
    marked: bool


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm and its runs.

    Attributes:
        name: unique within a comparison.
        recipe: name of its recipe; empty if unknown.
        removed: callbacks that it leaves out.
        runs: by seed, ascending.
        values: by a measure's key, by seed; a seed without the value has no entry.
        errors: by seed, the line that a failed run ended with.
    """

    name: str
    recipe: str
    removed: tuple[str, ...]
    runs: dict[int, RecordedRun]
    values: dict[str, dict[int, float]]
    errors: dict[int, str]


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
