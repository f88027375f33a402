"""What a backend is, and what a chip can multiply."""

from dataclasses import dataclass
from typing import Protocol

import torch

from lightning_qrl.precision.linear import LinearPrecision, QuantLinear

Shape = tuple[int, ...]  # of a weight
ADA = (8, 9)  # the first compute capability with FP8 units
BLACKWELL = (10, 0)  # the first with units for MX and NVFP4


@dataclass(frozen=True, slots=True)
class Chip:
    """What computes the layers.

    Attributes:
        name: for people, such as "NVIDIA H200".
        capability: CUDA compute capability; None where CUDA's low-precision units are not.
    """

    name: str
    capability: tuple[int, int] | None = None

    def at_least(self, capability: tuple[int, int]) -> bool:
        """Whether it is of that generation of CUDA chips, or a later one."""
        return self.capability is not None and self.capability >= capability


CPU = Chip("this CPU")


def find_chip(accelerator: str = "auto") -> Chip:
    """The chip that a run will compute on.

    Args:
        accelerator: of the trainer ("auto", "gpu", "cpu", ...), or the type of a device.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        # An AMD chip has other FP8 numbers, and says so by no capability.
        amd = torch.version.hip is not None
        capability = None if amd else torch.cuda.get_device_capability()
        return Chip(torch.cuda.get_device_name(), capability)
    return CPU if accelerator in ("auto", "cpu") else Chip(f"accelerator {accelerator}")


class Backend(Protocol):
    """One way to compute the GEMMs of linear layers: one module of this package, one class.

    Attributes:
        name: what recipes call it; the name of its module.
    """

    name: str

    def obstacle(self, precision: LinearPrecision, shape: Shape, chip: Chip) -> str | None:
        """Why this precision cannot be computed on this chip, in a few words; None if it can."""

    def idle(self, precision: LinearPrecision, chip: Chip) -> str | None:
        """Why it would be no faster than emulation; None where the chip has units for it."""

    def layer(self) -> type[QuantLinear]:
        """The class of the layers; it computes what another backend computes as `QuantLinear`."""
