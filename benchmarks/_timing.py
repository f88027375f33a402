"""Timing things beside each other: one round runs each of them once, so that all share the noise.

Medians over the rounds; a machine that slows down for a while slows all of them down.
"""

import statistics
import time
from collections.abc import Callable, Mapping

WARM_UP = 3  # rounds that are not counted: kernels are compiled, caches filled


def interleaved_ms(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each step, in milliseconds.

    Args:
        steps: what to time, by name.
        rounds: how often each is timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(WARM_UP + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
