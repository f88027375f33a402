"""What can be set in the reference model, and the presets that recipes stand for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from lightning_qrl.simulator.constants import Backward, Horizon, Precision
from lightning_qrl.simulator.words import plain

LIMITS = {
    "max_staleness": (0, 1000),
    "batch": (1, 1024),
    "samplers": (1, 1024),
    "seed": (0, 2**31 - 1),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run of the reference model; `idle` says which settings are without effect.

    Attributes:
        precision: of the forward pass, in sampler and trainer.
        backward: what operands the backward pass takes.
        bf16_tail: the last 15% of the layers stay in BF16.
        shared_experts: they stay in BF16.
        four_over_six: FP4 blocks choose between two scales.
        max_staleness: versions that a queued rollout may be behind; 0 is synchronous.
        weight_sync: new weights are broadcast, and rollouts change weights in mid-flight; else a
            sampler takes the newest when it starts one, in no time.
        batch: rollouts of an optimizer step.
        horizon: how long rollouts are.
        samplers: each works at one rollout at a time.
        seed: 0 is the post's one run; others show how much of an outcome is its random numbers.

    Raises:
        ValueError: a value is of the wrong type, or impossible.
    """

    precision: Precision = "fp8"
    backward: Backward = "dequantized"
    bf16_tail: bool = True
    shared_experts: bool = False
    four_over_six: bool = False
    max_staleness: int = 2
    weight_sync: bool = False
    batch: int = 4
    horizon: Horizon = "med"
    samplers: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for item in fields(self):
            _check(item.name, getattr(self, item.name), types[item.name])

    def shown(self) -> dict[str, Any]:
        """What is said of them, by name."""
        return asdict(self)


def _check(name: str, value: Any, kind: Any) -> None:
    if choices := get_args(kind):
        if value not in choices:
            raise ValueError(f"{name} is {' or '.join(choices)}, got {plain(value)}")
    elif type(value) is not kind:
        raise ValueError(f"{name} is {'true or false' if kind is bool else 'a whole number'}, "
                         f"got {plain(value)}")  # fmt: skip
    elif name in LIMITS and not LIMITS[name][0] <= value <= LIMITS[name][1]:
        least, most = LIMITS[name]
        raise ValueError(f"{name} must be at least {least} and at most {most}, got {plain(value)}")


_PLAIN = "bf16 quantizes nothing"
_SCALES = "only fp4 has two scales"
IDLE: Mapping[Precision, Mapping[str, str]] = MappingProxyType(
    {
        "bf16": MappingProxyType(
            {"backward": _PLAIN, "bf16_tail": _PLAIN, "shared_experts": _PLAIN,
             "four_over_six": _SCALES}
        ),
        "fp8": MappingProxyType({"four_over_six": _SCALES}),
        "fp4": MappingProxyType({}),
    }
)  # fmt: skip


def idle(settings: Settings) -> Mapping[str, str]:
    """Which settings have no effect beside the others, whatever their value: why, by key."""
    return IDLE[settings.precision]


_FP4 = {"precision": "fp4", "bf16_tail": False}
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bf16": {"precision": "bf16"},
        "fp8_hp": {"precision": "fp8", "backward": "high_precision"},
        "fp8_dq": {"precision": "fp8"},
        "fp4_naive": {**_FP4, "backward": "high_precision"},
        "fp4_dq": _FP4,
        "fp4_46_dq": {**_FP4, "four_over_six": True},
        "fp4_46_dq_tail": {"precision": "fp4", "four_over_six": True},
        "fp4_full": {"precision": "fp4", "four_over_six": True, "shared_experts": True},
    }
)
