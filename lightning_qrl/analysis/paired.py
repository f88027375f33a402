"""How an arm differs from another over seeds that both have: interval, p, and Holm's correction.

d_n is the difference between the two runs of seed n, of N; m its mean, s its standard deviation,
t = t(N - 1) the 97.5% quantile of Student's distribution. The interval is a percentile bootstrap
over seeds, [m - L, m + U], made as wide as Student's:

    low = m - 2 t s/sqrt(N) L/(L + U),    high = m + 2 t s/sqrt(N) U/(L + U)

The percentiles of a bootstrap over 2 to 5 seeds lie far too close: of normal differences they hold
the true mean 48% of the time with 2 seeds, 67% with 3, 84% with 5. Their two sides do tell of skew,
though. So Student says how wide, and the bootstrap how much of it is on either side.

How often the interval holds the true mean, in percent, of 10 000 simulated experiments each:

    differences          N =   2     3     5    10    20
    normal                  95.5  94.7  95.0  95.3  95.3
    Student's t(3)          95.9  96.1  95.8  95.1  94.4
    uniform                 93.1  92.4  94.2  95.3  95.5
    -1, 0 or 1, alike       77.4  92.5  94.8  95.5  95.0
    lognormal               89.9  84.4  83.4  85.5  88.2
    1 with chance 0.2       32.6  47.8  67.0  89.0  91.7

Student's own interval does as well on the symmetric ones, and up to 1.6 points worse on the
lognormal one. No method can know of a tail that no seed has shown: of rare events (the last row) a
few seeds say little. Differences of equal recipes are symmetric, whatever runs are like; what is
skewed is a difference that is there.

p is that of a paired t-test (two-sided). Differences that are all alike, and not 0, have no spread
for it to judge by: mostly they are copies, or coarse measurements. There p is that of the sign-flip
test, 2^(1 - N), below 0.05 from 6 seeds on, and the interval is the point.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

Floats = NDArray[np.float64]

ENUMERATED = 5  # up to so many seeds, all N^N resamples are taken
RESAMPLES = 4000  # else so many at random, always the same ones
TAILS = (0.025, 0.975)
ROUNDING = 8 * float(
    np.finfo(np.float64).eps
)  # differences this alike, of values near 1, are equal


@dataclass(frozen=True, slots=True)
class Paired:
    """A paired difference.

    Attributes:
        pairs: number of seeds.
        mean: of the differences; NaN without pairs.
        low: lower end of the 95% interval; NaN with fewer than two pairs.
        high: its upper end.
        p: two-sided; NaN with fewer than two pairs.
    """

    pairs: int
    mean: float
    low: float
    high: float
    p: float


def paired(arm_N: Sequence[float] | Floats, other_N: Sequence[float] | Floats) -> Paired:
    """The difference arm - other over seeds.

    Args:
        arm_N: one finite value a seed, [N].
        other_N: of the same seeds in the same order, [N].
    """
    arm_N, other_N = np.asarray(arm_N, np.float64), np.asarray(other_N, np.float64)
    assert arm_N.shape == other_N.shape, "every seed is in both"
    difference_N, pairs = arm_N - other_N, arm_N.size
    if pairs < 2:
        nothing = math.nan
        return Paired(pairs, float(difference_N[0]) if pairs else nothing, *[nothing] * 3)
    mean = float(difference_N.mean())
    rounding = ROUNDING * float(np.abs([arm_N, other_N]).max())
    if float(np.ptp(difference_N)) <= rounding:
        p = 1.0 if abs(mean) <= rounding else 2.0 ** (1 - pairs)
        return Paired(pairs, mean, mean, mean, p)
    error = float(difference_N.std(ddof=1)) / math.sqrt(pairs)
    below, above = np.abs(np.quantile(_resampled(pairs) @ difference_N, TAILS) - mean)
    width = 2 * float(stdtrit(pairs - 1, TAILS[1])) * error / (below + above)
    p = 2 * float(stdtr(pairs - 1, -abs(mean) / error))
    return Paired(pairs, mean, float(mean - width * below), float(mean + width * above), p)


def holm(p_A: Sequence[float]) -> list[float]:
    """Values of p corrected for their number (Holm 1979): the chance of any false one stays.

    With A tests in ascending order, p_(a) becomes max over b <= a of min(1, (A - b + 1) p_(b)).

    Args:
        p_A: one a test; NaN is no test, does not count and stays NaN.
    """
    tests = sorted((p, index) for index, p in enumerate(p_A) if not math.isnan(p))
    corrected, largest = list(p_A), 0.0
    for rank, (p, index) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        corrected[index] = largest
    return corrected


@cache
def _resampled(count: int) -> Floats:
    """The share of each seed in each resample, [R, N]."""
    if count <= ENUMERATED:
        drawn = np.array(list(itertools.product(range(count), repeat=count)))
        times = (drawn[:, :, None] == np.arange(count)).sum(axis=1)
    else:
        times = np.random.default_rng(0).multinomial(
            count, np.full(count, 1 / count), size=RESAMPLES
        )
    shares_RN: Floats = times / count
    return shares_RN
