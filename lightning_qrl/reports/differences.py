"""How arms differ from the baseline in a measure: paired by seed, corrected for their number."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_qrl.analysis.paired import holm, paired
from lightning_qrl.reports.arms import Arm
from lightning_qrl.reports.measures import Measure

LEVEL = 0.05


@dataclass(frozen=True, slots=True)
class Difference:
    """How an arm differs from the baseline in one measure, over the seeds that both have.

    Attributes:
        pairs: number of seeds.
        mean: of the differences arm - baseline, of logarithms where the measure's scale is
            ``ratio``; so 0 is always "no difference". NaN without pairs.
        low: lower end of the 95% bootstrap interval; NaN with fewer than two pairs.
        high: its upper end.
        p: two-sided, of a paired t-test; NaN with fewer than two pairs.
        p_holm: the same, corrected for the number of arms that are compared (Holm 1979).
        marked: whether the interval excludes zero and ``p_holm`` is below 0.05, and it is not
            withheld.
        withheld: whether it would be marked, but that the arm has lost more seeds than what it is
            compared with: those that survived flatter it.
    """

    pairs: int
    mean: float
    low: float
    high: float
    p: float
    p_holm: float
    marked: bool
    withheld: bool = False


def scaled(measure: Measure, arms: Sequence[Arm]) -> Measure:
    """A ratio needs values above zero; where one is not, all of the measure goes by difference."""
    values = [value for arm in arms for value in arm.known(measure.key).values()]
    return measure if min(values, default=1.0) > 0 else replace(measure, scale="difference")


def differences(
    arms: Sequence[Arm], references: Mapping[str, Arm], measure: Measure
) -> dict[str, Difference]:
    """Of every arm but the baseline.

    Args:
        arms: the baseline first.
        references: by an arm's name, what it is compared with.
        measure: what is compared.
    """
    others, key = arms[1:], measure.key
    results = [
        paired(*_pairs(arm.known(key), references[arm.name].known(key), measure)) for arm in others
    ]
    corrected = holm([result.p for result in results])
    found = {}
    for arm, r, p_holm in zip(others, results, corrected, strict=True):
        apart = p_holm < LEVEL and not r.low <= 0 <= r.high
        withheld = apart and arm.lost(key) > references[arm.name].lost(key)
        found[arm.name] = Difference(
            r.pairs, r.mean, r.low, r.high, r.p, p_holm, marked=apart and not withheld,
            withheld=withheld,
        )  # fmt: skip
    return found


def _pairs(
    own: Mapping[int, float], base: Mapping[int, float], measure: Measure
) -> tuple[list[float], list[float]]:
    seeds = sorted(own.keys() & base.keys())
    scale = math.log if measure.scale == "ratio" else float
    return [scale(own[seed]) for seed in seeds], [scale(base[seed]) for seed in seeds]
