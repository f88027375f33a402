"""MX formats: blocks of 32 small floats that share one power of two (E8M0).

    x ~ element * 2^e        element = RNE(clamp(x / 2^e, +-largest))

`scale_rule` says how e follows from the block's amax, with emax the exponent of the element's
largest value (E4M3: largest 448, emax 8). The names are torchao's `ScaleCalculationMode`:

    floor   floor(log2(amax)) - emax      OCP's; amax / 2^e is in [256, 512), above 448 saturates
    ceil    ceil(log2(amax)) - emax       nothing saturates; up to half of the range is idle
    rceil   ceil(log2(amax / largest))    the least scale that saturates nothing; Blackwell's
    even    floor(log2(r)) - emax         r is amax rounded to the element's mantissa bits

All four are one addition on the FP32 bits of amax: adding just enough that a carry reaches the
exponent field is rounding up, and the field is then the answer. So `rceil` is exact, as the
hardware's cvt.rp is; torchao's CPU path takes a floating-point log2, which misses the step for an
amax within a few ulps above a power of two times 448.

Edges. E8M0 has no zero: the smallest scale is 2^-127, and an all-zero block has it. With that scale
an element times its scale may need bits below BF16's subnormals (2^-133): values of blocks with
amax below 2^-118 are exact in FP32 but not all in BF16. (For such blocks torchao stores 2^-127 and
divides by 2^-126, or for rceil by 1; here the stored scale is the one that is divided by.) The
largest scale is 2^119, so that 448 times it is finite in FP32; torchao goes to 2^120.

Source: OCP Microscaling Formats v1.0, sections 5 and 6.3; torchao.prototype.mx_formats.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.base import finite_magnitudes
from lightning_qrl.formats.blocks import BlockFormat, block_amax
from lightning_qrl.formats.small_float import (
    E4M3,
    FP32_EXPONENT_BIAS,
    FP32_MANTISSA_BITS,
    SmallFloat,
)

E8M0_SMALLEST = 2.0**-127


@dataclass(frozen=True, slots=True)
class _MX(BlockFormat):
    """What MX formats share. A subclass names itself and its element."""

    scale_rule: Literal["floor", "ceil", "rceil", "even"] = "floor"

    block: ClassVar[int] = 32

    @override
    def quantize_blocks(self, x_bK: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        magnitudes_bK = finite_magnitudes(x_bK, nan=math.nan)
        amax_b1 = block_amax(magnitudes_bK)
        field_b1 = self._scale_field(amax_b1)
        # 0.0 * NaN hands a block's NaN on to its scale.
        scale_b1 = _power_of_two(field_b1) + 0.0 * amax_b1
        inverse_b1 = _power_of_two(2 * FP32_EXPONENT_BIAS - field_b1)
        elements_bK = self.element.round_(x_bK * inverse_b1, scratch=magnitudes_bK)
        return elements_bK.mul_(scale_b1), scale_b1, None

    def _scale_field(self, amax_b1: Tensor) -> Tensor:
        """Each block's e + 127, int32 [..., blocks, 1]; any number where amax is NaN."""
        one, emax = 1 << FP32_MANTISSA_BITS, self.element.emax
        if self.scale_rule == "rceil":
            amax_b1, emax = amax_b1 / self.element.largest, 0
            # Bits of FP32 subnormals do not say their exponent; these round up to E8M0's least.
            amax_b1 = amax_b1 * (amax_b1 > E8M0_SMALLEST)
        carry = {
            "floor": 0,
            "ceil": one - 1,
            "rceil": one - 1,
            "even": one >> (self.element.mantissa_bits + 1),
        }[self.scale_rule]
        field_b1 = (amax_b1.view(torch.int32) + carry) >> FP32_MANTISSA_BITS
        return (field_b1 - emax).clamp_(0, 2 * FP32_EXPONENT_BIAS - self.element.emax)


def _power_of_two(field: Tensor) -> Tensor:
    """2^(field - 127) in FP32, for an int32 field in [0, 254]."""
    subnormal = 1 << (FP32_MANTISSA_BITS - 1)  # the bits of 2^-127
    return (field << FP32_MANTISSA_BITS).clamp_min_(subnormal).view(torch.float32)


@dataclass(frozen=True, slots=True)
class MXFP8(_MX):
    """MXFP8: E4M3 elements.

    Args:
        scale_rule: how the block's power of two follows from its amax.
    """

    name: ClassVar[str] = "mxfp8"
    bits: ClassVar[float] = 8.0 + 8.0 / 32
    element: ClassVar[SmallFloat] = E4M3
