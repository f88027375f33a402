"""Rounding: to the nearest value, or up or down at random in proportion to the distance.

Stochastic rounding is right on average: E[round(x)] = x. It draws from a generator of its own, so
that neither sampling nor data order changes with it; whoever wants a draw again seeds it again.
"""

from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic"]

_generators: dict[torch.device, torch.Generator] = {}


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that formats draw from when they are given none; seeded with 0 at first."""
    if device not in _generators:
        _generators[device] = torch.Generator(device).manual_seed(0)
    return _generators[device]


def up_or_down_(x: Tensor, noise: Tensor) -> Tensor:
    """An integer next to x: the upper one where the noise is below x's distance from the lower.

    (Flooring x + noise would do, but for noise near 1, where FP32 rounds the sum up to an integer
    too far: 3 would now and then become 4.)

    Args:
        x: FP32; overwritten.
        noise: uniform in [0, 1), of x's shape.
    """
    below = x.floor()
    return below.add_(noise < x.sub_(below))


def noise_for(x: Tensor, rounding: Rounding, generator: torch.Generator | None) -> Tensor | None:
    """Uniform numbers in [0, 1) of x's shape, FP32; None where rounding is to the nearest."""
    if rounding == "nearest":
        return None
    return torch.rand(x.shape, generator=generator or default_generator(x.device), device=x.device)
