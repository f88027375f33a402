"""What is measured in the course of an optimizer step, and how it becomes one row of numbers.

Metrics come from the rollout, from each micro-batch and from the clock; they are merged over
micro-batches and ranks (`metrics`) when the optimizer is about to step.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lightning_qrl.metrics import Metric, Tally


class StepMetrics:
    """Collects the metrics of one optimizer step after the other.

    Attributes:
        rollout: metrics of the rollout; every update on it reports them again.
        num_tokens: tokens trained on since the run began.
    """

    def __init__(self) -> None:
        self.rollout: dict[str, Metric] = {}
        self.num_tokens = 0
        self._tally = Tally()
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def begin(self) -> None:
        """The step's clock starts; without it, it started where the last step ended."""
        self._began = time.perf_counter()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time a part of the step, logged as ``timing_s/PART``."""
        began = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Merge the metrics of one micro-batch, by their full names."""
        self._tally.add(metrics)

    def so_far(self, name: str) -> float:
        """The value of a micro-batch's metric over those of the step, of all ranks, until now."""
        return self._tally.so_far(name)

    def finish(self) -> dict[str, float]:
        """Every metric of the step by its full name; then the next step begins."""
        self._tally.add(self.rollout)
        values = self._tally.flush()
        tokens = values.pop("num_tokens")
        self.num_tokens += int(tokens)
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        times, self._seconds = self._seconds, {}
        within, spread = (values.get(f"train/reward_{n}", 0.0) for n in ("variance_within", "std"))
        values |= {
            "train/num_tokens": self.num_tokens,
            "train/residual_variance": within / spread**2 if spread else 0.0,
            "train/step_time": seconds,
            "train/tokens_per_second": tokens / seconds,
            "timing_s/update_actor": seconds - sum(times.values()),
        }
        return values | {f"timing_s/{part}": taken for part, taken in times.items()}
