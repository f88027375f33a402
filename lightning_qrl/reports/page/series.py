"""Histories made ready to be drawn: smoothed, gathered over seeds, thinned without losing a peak.

A curve over seeds is drawn only at steps at which every seed has a finite value. A mean over the
seeds that are left would jump where one is lost, and upwards if it was the worst.

Its band is the 95% interval of the mean by Student's t, mean ± t(0.975, n-1) · s / sqrt(n), from
four seeds on. With two or three that is 4 to 18 times the standard error and hides the figure
without telling more than the seeds do, so the band is then their range. On a log scale it always
is: what is drawn there may be zero, and of such values an interval may reach below it.

A long history is thinned to the smallest and the largest value of each bin of steps (and one of
its gaps, if it has any): what a screen of that width would show of the whole.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_qrl.tracking.histories import History

Floats = NDArray[np.float64]
Band = Literal["interval", "range", "none"]
BINS = 150  # of steps, in a panel that is about as many points wide
ENOUGH = 4  # seeds, for an interval of the mean


class Spread(NamedTuple):
    """A quantity over the seeds of an arm; NaN where not all of them have a finite value."""

    steps: NDArray[np.int64]  # [S]
    middle: Floats  # [S]
    low: Floats  # [S]
    high: Floats  # [S]


def finite(values: Floats) -> Floats:
    """The values that an axis can show, NaN for others."""
    return np.where(np.isfinite(values), values, np.nan)


def smoothed(history: History, window: int) -> History:
    """A centred moving mean over a window of values, shorter at the ends; gaps stay gaps.

    Args:
        history: regular in its steps.
        window: odd.
    """
    known = np.isfinite(history.values)
    ones = np.ones(window)
    sums = np.convolve(np.where(known, history.values, 0.0), ones, "full")
    counts = np.convolve(known, ones, "full")
    at = slice(window // 2, window // 2 + len(known))  # "same" is longer than a short history
    means = sums[at] / np.maximum(counts[at], 1)
    return History(history.steps, np.where(known, means, history.values))


def band_for(counts: Sequence[int]) -> Band:
    """The band that suits arms of so many seeds: one kind for all of them."""
    several = [count for count in counts if count > 1]
    if not several:
        return "none"
    return "interval" if min(several) >= ENOUGH else "range"


def spread(histories: Sequence[History], band: Band) -> Spread:
    """The mean over seeds, and its band.

    Args:
        histories: one a seed, at least one.
        band: its kind.
    """
    steps = reduce(np.intersect1d, (history.steps for history in histories))
    rows = [h.values[np.searchsorted(h.steps, steps)] for h in histories]
    values_NS = finite(np.array(rows))
    middle = values_NS.mean(axis=0)  # NaN if one is
    low, high = values_NS.min(axis=0), values_NS.max(axis=0)
    if band == "interval" and len(rows) > 1:
        half = _t(len(rows) - 1) * values_NS.std(axis=0, ddof=1) / np.sqrt(len(rows))
        low, high = middle - half, middle + half
    return Spread(steps, middle, low, high)


def _t(degrees: int) -> float:
    from scipy.special import stdtrit  # a tenth of the time that scipy.stats takes to import

    return float(stdtrit(degrees, 0.975))


def thinned(history: History) -> History:
    """The extremes of each of `BINS` bins of steps, in their order; gaps stay gaps."""
    steps, values = history
    if len(steps) <= 2 * BINS:
        return history
    width = -(-len(steps) // BINS)
    padded = np.full(-(-len(steps) // width) * width, np.nan)
    padded[: len(steps)] = values
    bins = padded.reshape(-1, width)
    gaps = np.isnan(bins)
    within = np.stack(
        (
            np.where(gaps, np.inf, bins).argmin(axis=1),
            np.where(gaps, -np.inf, bins).argmax(axis=1),
            np.where(gaps.any(axis=1), gaps.argmax(axis=1), 0),  # its first gap
        )
    )
    at = np.unique(within + width * np.arange(len(bins)))
    at = at[at < len(steps)]
    return History(steps[at], values[at])


def thinned_band(band: Spread) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Steps and the outermost edges of a band in each of `BINS` bins."""
    steps, _, low, high = band
    if len(steps) <= 2 * BINS:
        return steps, low, high
    starts = np.linspace(0, len(steps), BINS, endpoint=False, dtype=np.int64)
    low, high = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    return steps[starts], low, high
