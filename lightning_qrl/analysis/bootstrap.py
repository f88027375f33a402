"""Bootstrap intervals for learning curves: over seeds, and over the slow noise of a single curve.

With several seeds, whole curves are resampled. With one, its residuals e about the fitted curve
are. Neighbours are alike, so what is drawn is the surprise in each, e_t - rho e_(t-1), in blocks of
consecutive ones (moving-block bootstrap, Künsch 1989), and new residuals are built up from these
with the same rho ("post-blackening", Davison and Hinkley 1997, section 8.2.3). Plain blocks lose
the likeness at each joint, and their intervals are too short. rho is the correlation of neighbours,
raised by about what fitting p parameters to S points takes off it, (p + 1)(1 + rho) / S; blocks are
as long as the likeness that is left in the surprises asks for (Andrews 1991).

Percentiles of a small sample's bootstrap lie too close. So deviations from the estimate are
stretched,

    sqrt(k / (k - p)) t(k - p) / 1.96

with k seeds and p = 1, or p parameters and k = S (1 - rho) / (1 + rho), the number of independent
points that S points like these are worth.

R resamples, where row 0 is the sample itself; S points, K seeds.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from lightning_qrl.analysis.sensitivity import Estimate

Floats = NDArray[np.float64]

RESAMPLES = 1000
TAILS = (0.025, 0.975)
NORMAL = 1.959963984540054  # the normal quantile of the upper tail
MARGIN = 1e-6  # this near to an edge is on it
WARM_UP = 50  # points after which a residual has forgotten where it began
ALIKE = 0.95  # more likeness than this is no noise about a curve


def interval(values_R: Floats, factor: float) -> Estimate:
    """The value of row 0 with its 95% interval, stretched by a factor."""
    value = float(values_R[0])
    low, high = (value + factor * (float(q) - value) for q in np.quantile(values_R[1:], TAILS))
    return Estimate(value, low, high)


def open_interval(log_R: Floats, edges: Floats, factor: float) -> Estimate:
    """A positive parameter from its logarithms, found between two edges of a search.

    An end of the interval on an edge is open, 0 or infinite, and a value there is NaN.
    """
    found = interval(log_R, factor)
    low, high = edges[0] + MARGIN, edges[1] - MARGIN
    return Estimate(
        math.exp(found.value) if low < found.value < high else math.nan,
        math.exp(found.low) if found.low > low else 0.0,
        math.exp(found.high) if found.high < high else math.inf,
    )


def stretch(count: float, parameters: int) -> float:
    """What makes percentiles of a bootstrap over so many independent things wide enough."""
    left = max(count - parameters, 1.0)
    return math.sqrt((left + parameters) / left) * float(stdtrit(left, TAILS[1])) / NORMAL


def seed_weights(seeds: int, rng: np.random.Generator) -> Floats:
    """How often each seed is in each resample, [1 + RESAMPLES, K]."""
    drawn = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES)
    weights_RK: Floats = np.concatenate([np.ones((1, seeds)), drawn])
    return weights_RK


def likeness(residuals: Sequence[Floats], parameters: int) -> float:
    """The correlation rho of neighbouring residuals, of curves fitted together."""
    square = sum(float(e @ e) for e in residuals)
    if not square:
        return 0.0
    rho = sum(float(e[1:] @ e[:-1]) for e in residuals) / square
    rho += (parameters + 1) * (1 + rho) / sum(e.size for e in residuals) if parameters else 0.0
    return min(max(rho, 0.0), ALIKE)  # unlike neighbours are chance: noise is not that quick


def independent_points(points: int, rho: float) -> float:
    """How many independent measurements these are worth."""
    return points * (1 - rho) / (1 + rho)


def resampled_residuals(
    error_S: Floats, length: int, parameters: int, rng: np.random.Generator
) -> Floats:
    """New residuals like those of a fitted curve, [RESAMPLES, length]."""
    rho = likeness([error_S], parameters)
    surprise = error_S[1:] - rho * error_S[:-1]
    surprise = surprise - surprise.mean()
    block = _block(likeness([surprise], 0), surprise.size)
    count = -(-(WARM_UP + length) // block)
    start = rng.integers(surprise.size - block + 1, size=(RESAMPLES, count, 1))
    noise = surprise[start + np.arange(block)].reshape(RESAMPLES, -1)
    for t in range(1, noise.shape[1]):
        noise[:, t] += rho * noise[:, t - 1]
    kept: Floats = noise[:, WARM_UP : WARM_UP + length]
    return kept


def _block(rho: float, size: int) -> int:
    """Andrews's length for the triangular weights that a block bootstrap amounts to."""
    alpha = 4 * rho**2 / (1 - rho**2) ** 2
    return min(max(math.ceil(1.1447 * math.cbrt(alpha * size)), 1), size)
