"""The two sides of a run, training and sampling, and which of them the layers are on now."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from lightning_qrl.formats import Operand

Side = Literal["train", "rollout"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(slots=True)
class SideSwitch:
    """What the layers of one model share: the side they are on, and the noise of their rounding.

    While the sampler runs, or one batch is scored, the weights stand still, so each is quantized
    once: `weights` keeps the quantized weights until then.

    Attributes:
        current: the side.
        holds: whether the weights stand still.
        weights: by what names the weight, while they do.
        seed: of stochastic rounding; whoever needs a draw again sets it again.
    """

    current: Side = "train"
    holds: bool = False
    weights: dict[Hashable, Operand] = field(default_factory=dict)
    seed: int = 0
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def reseed(self, seed: int) -> None:
        """Begin the noise of stochastic rounding anew."""
        self.seed = seed
        self._generators.clear()

    def generator(self, tensor: Tensor) -> torch.Generator:
        """The generator of the tensor's device, which no other part of a run draws from."""
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model switches with the model: the plan that switches them is one."""
        return self
