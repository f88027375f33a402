"""The gradient noise scale: the batch size at which noise and signal of a gradient are equal.

With gradients x_i of single samples, of mean G and covariance Sigma (McCandlish et al., arXiv
1812.06162, section 2.2 and appendix A.1, the "simple" noise scale):

    B = tr(Sigma) / |G|^2

Batches far below B average too little, far above it more than is of use. Take a step of C samples
in parts of n_j, whose gradients g_j = 1/C sum_i x_i add up to the step's g. With Q = sum_j n_j^2

    E |g|^2         =     |G|^2 + tr(Sigma) / C
    E sum_j |g_j|^2 = Q/C^2 |G|^2 + tr(Sigma) / C

which, solved, gives unbiased estimates of both. For parts of equal size these are the paper's, with
all the parts in the place of one small batch. A ratio of noisy numbers is biased, so both are
smoothed first, and divided then; either may be negative at a single step.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """A moving average of signal and noise over steps; begin with none.

    Attributes:
        signal_total: weighted sum of the estimates of |G|^2.
        noise_total: the same of tr(Sigma).
        weight: sum of the weights, 1 - decay^steps.
    """

    signal_total: float = 0.0
    noise_total: float = 0.0
    weight: float = 0.0

    def updated(self, signal: float, noise: float, decay: float) -> "GradientNoise":
        """With one step more; ``decay`` is what remains of the weight of the older ones."""
        return GradientNoise(
            decay * self.signal_total + (1 - decay) * signal,
            decay * self.noise_total + (1 - decay) * noise,
            decay * self.weight + 1 - decay,
        )

    @property
    def signal(self) -> float:
        """The average of |G|^2; dividing by the weight takes out that it began at 0."""
        return self.signal_total / self.weight

    @property
    def noise(self) -> float:
        """The average of tr(Sigma)."""
        return self.noise_total / self.weight

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None where no signal stands out."""
        return self.noise / self.signal if self.signal > 0 else None


def estimate(
    whole: float, parts: float, samples: float, squares: float
) -> tuple[float, float] | None:
    """Signal and noise from one step.

    Args:
        whole: |g|^2 of the step.
        parts: sum of the |g_j|^2 of its parts; the g_j add up to g.
        samples: C, samples of the step.
        squares: Q, sum of the squared numbers of samples of the parts.

    Returns:
        Unbiased estimates of |G|^2 and tr(Sigma); None of less than two parts with samples, and
        of a gradient that is not finite.
    """
    share = squares / samples**2 if samples else 1.0
    if share >= 1 or not math.isfinite(whole + parts):
        return None
    signal = (whole - parts) / (1 - share)
    return signal, samples * (parts - share * signal)
