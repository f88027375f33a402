"""Numbers that no calibration has are refused by the name of the one that is wrong.

The limits are wide: they keep what a file says from running out of floating point, and a run from
taking for ever. What a fit may find lies far within.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from lightning_qrl.simulator.constants import Learning

Limits = Mapping[str, tuple[float, float]]
LARGEST = 1e9
SHARE, POSITIVE, SIGNED = (0.0, 1.0), (1e-12, LARGEST), (-LARGEST, LARGEST)

LEARNING: Limits = MappingProxyType(
    dict.fromkeys((item.name for item in fields(Learning)), (0.0, LARGEST))
    | dict.fromkeys(("reward_start", "reward_ceiling", "reward_least"), SIGNED)
    | dict.fromkeys(("least_progress", "drift_cost_limit", "collapse", "reward_rate"), SHARE)
    | {"staleness_power": (0.0, 10.0), "decay": (1e-12, 1.0)}
    | dict.fromkeys(("half", "mismatch_limit", "divergence"), POSITIVE)
)
NEW: Limits = MappingProxyType(
    {"settling": (0.0, 10.0), "erosion": (0.0, 1e3), "erosion_power": (0.0, 100.0)}
)
PLAN: Limits = MappingProxyType(
    dict.fromkeys(("floor", "measured_floor"), (0.0, 1e3))
    | dict.fromkeys(("sampling_seconds", "update_seconds"), (1e-6, 1e6))
    | {"tokens": (1.0, LARGEST)}
)
DOMAIN: Limits = MappingProxyType(
    dict.fromkeys(("runs", "settings", "steps", "group_size"), (1, LARGEST))
    | {"largest_lag": (0.0, LARGEST)}
)


def check_limits(part: Any, limits: Limits, prefix: str = "") -> None:
    """Raise ValueError where a number is out of its limits, or is none. None is let pass.

    Args:
        part: has the numbers as attributes.
        limits: of each, the least and the most.
        prefix: of their names in the message.
    """
    for name, (least, most) in limits.items():
        value = getattr(part, name)
        if value is not None and not least <= value <= most:
            raise ValueError(
                f"{prefix}{name} must be at least {least:g} and at most {most:g}, got {value:g}"
            )


def check_finite(values: Any, where: str = "") -> None:
    """Raise ValueError where a number within mappings and sequences is not finite."""
    if isinstance(values, Mapping):
        inner = values.items()
    elif isinstance(values, list | tuple):
        inner = dict(enumerate(values)).items()
    else:
        if isinstance(values, float) and not math.isfinite(values):
            raise ValueError(f"{where} is a finite number, got {values}")
        return
    for name, value in inner:
        check_finite(value, f"{where}.{name}" if where else f"{name}")
