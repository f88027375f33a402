"""The parts of a cluster: pools of samplers, trainers, and the way of the weights between them."""

import math
from dataclasses import dataclass

from lightning_qrl.simulator.cluster.checks import check_flags, check_numbers

YEAR = 366 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Samplers:
    """A pool of equal samplers.

    Attributes:
        slots: completions at one time.
        tokens_per_second: of a slot; inf: a completion takes no time.
        prefill_tokens_per_second: at which a slot reads a prefix again when the weights change in
            mid-completion; inf: it need not.
        gpus: of the pool.
        price: dollars of a GPU-hour.

    Raises:
        ValueError: a value is out of range.
    """

    slots: int = 512
    tokens_per_second: float = 40.0
    prefill_tokens_per_second: float = math.inf
    gpus: int = 8
    price: float = 2.5

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {
                "slots": (1, 1_000_000),
                "tokens_per_second": (1e-6, math.inf),
                "prefill_tokens_per_second": (1e-6, math.inf),
                "gpus": (0, 10_000_000),
                "price": (0, 1e9),
            },
        )


@dataclass(frozen=True, kw_only=True)
class Trainers:
    """Data-parallel trainers: completions are dealt over them, and the slowest share counts.

    Attributes:
        count: how many.
        tokens_per_second: of each; inf: only the overhead counts.
        overhead: seconds of an optimizer step whatever its batch.
        gpus: of each.
        price: dollars of a GPU-hour.

    Raises:
        ValueError: a value is out of range, or a step would take no time.
    """

    count: int = 8
    tokens_per_second: float = 2500.0
    overhead: float = 2.0
    gpus: int = 1
    price: float = 2.5

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {
                "count": (1, 1_000_000),
                "tokens_per_second": (1e-6, math.inf),
                "overhead": (0, YEAR),
                "gpus": (0, 1_000_000),
                "price": (0, 1e9),
            },
        )
        if math.isinf(self.tokens_per_second) and self.overhead < 1e-6:
            raise ValueError("overhead must be at least 1e-6 with tokens_per_second=inf, or a step "
                             f"takes no time; got {self.overhead:g}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """How weights get from the trainers to the samplers: latency + bytes / bandwidth.

    Attributes:
        parameters: that are sent.
        bits: of each.
        bandwidth: bytes a second; inf: at once.
        latency: seconds.
        blocks_trainer: the next phase of training waits for the end.

    Raises:
        ValueError: a value is out of range.
    """

    parameters: float = 8e9
    bits: float = 16.0
    bandwidth: float = 5e10
    latency: float = 0.2
    blocks_trainer: bool = True

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {
                "parameters": (0, 1e15),
                "bits": (0, 64),
                "bandwidth": (1, math.inf),
                "latency": (0, YEAR),
            },
        )
        check_flags(self, "blocks_trainer")

    @property
    def seconds(self) -> float:
        """That one takes."""
        return self.latency + self.parameters * self.bits / 8 / self.bandwidth
