"""How the scales of blocks are stored: as FP32, as BF16, or as E8M0, an exponent alone."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_qrl.formats.small_float import FP32_EXPONENT_BIAS, FP32_MANTISSA_BITS

E8M0_SMALLEST = 2.0**-127
E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class FP32Scale:
    """FP32, stored as it is."""

    bits: ClassVar[int] = 32

    def encode(self, elements: Tensor, sign_of: Tensor) -> Tensor:
        """The scales themselves."""
        return elements

    def decode(self, codes: Tensor) -> Tensor:
        """The scales themselves."""
        return codes


@dataclass(frozen=True, slots=True)
class BF16Scale:
    """Numbers that BF16 holds, as it does."""

    bits: ClassVar[int] = 16

    def encode(self, elements: Tensor, sign_of: Tensor) -> Tensor:
        """Each in BF16."""
        return elements.to(torch.bfloat16)

    def decode(self, codes: Tensor) -> Tensor:
        """Each in FP32."""
        return codes.float()


@dataclass(frozen=True, slots=True)
class E8M0:
    """A power of two, 2^-127 to 2^127, as its biased exponent; code 255 is NaN."""

    bits: ClassVar[int] = 8

    def encode(self, elements: Tensor, sign_of: Tensor) -> Tensor:
        """The code of each power of two, a byte."""
        field = elements.view(torch.int32) >> FP32_MANTISSA_BITS  # 2^-127 is subnormal: field 0
        return torch.where(elements.isnan(), E8M0_NAN, field).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The FP32 value of each code."""
        values = power_of_two(codes.int().clamp_max(2 * FP32_EXPONENT_BIAS))
        return torch.where(codes == E8M0_NAN, math.nan, values)


def power_of_two(field: Tensor) -> Tensor:
    """2^(field - 127) in FP32, for an int32 field in [0, 254]."""
    subnormal = 1 << (FP32_MANTISSA_BITS - 1)  # the bits of 2^-127
    return (field << FP32_MANTISSA_BITS).clamp_min(subnormal).view(torch.float32)
