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

A block is 32 neighbours of a row, or 32 x 32 (Transformer Engine's two-dimensional MXFP8).

Edges. E8M0 has no zero: the smallest scale is 2^-127, and an all-zero block has it. With that scale
an element times its scale may need bits below BF16's subnormals (2^-133): values of blocks with
amax below 2^-118 are exact in FP32 but not all in BF16. (For such blocks torchao stores 2^-127 and
divides by 2^-126, or for rceil by 1; here the stored scale is the one that is divided by.) The
largest scale is 2^(127 - emax), so that the largest element times it is finite in FP32; torchao
goes one step further.

Source: OCP Microscaling Formats v1.0, sections 5 and 6.3; torchao.prototype.mx_formats.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.blocks import BlockFormat, block_amax, magnitudes
from lightning_qrl.formats.compiling import apart
from lightning_qrl.formats.low_bit import Split
from lightning_qrl.formats.quantized import Block, Codec
from lightning_qrl.formats.scales import E8M0, E8M0_SMALLEST, power_of_two
from lightning_qrl.formats.small_float import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FP32_EXPONENT_BIAS,
    FP32_MANTISSA_BITS,
    SmallFloat,
)


@dataclass(frozen=True, slots=True)
class _MX(BlockFormat):
    """What MX formats share. A subclass names itself and its element.

    Args:
        scale_rule: how the block's power of two follows from its amax.
        block: [1, 32] or [32, 32].
    """

    scale_rule: Literal["floor", "ceil", "rceil", "even"] = "floor"
    block: Block = (1, 32)

    blocks: ClassVar[tuple[Block, ...]] = ((1, 32), (32, 32))
    element: ClassVar[SmallFloat]
    scale_codec: ClassVar[Codec | None] = E8M0()

    @property
    @override
    def bits(self) -> float:
        return self.element.bits + 8 / math.prod(self.block)

    @override
    def split(self, x_RBK: Tensor, noise_RBK: Tensor | None) -> Split:
        scratch_RBK = magnitudes(x_RBK)
        amax_RB = self.share(torch.amax, block_amax(scratch_RBK))
        field_RB = self._scale_field(amax_RB)
        # 0.0 * NaN hands a block's NaN on to its scale.
        scale_RB = apart(power_of_two(field_RB) + 0.0 * amax_RB)
        inverse_RB = apart(power_of_two(2 * FP32_EXPONENT_BIAS - field_RB))
        elements_RBK = self.element.round_(x_RBK * inverse_RB[..., None], scratch_RBK, noise_RBK)
        return Split(elements_RBK.mul_(scale_RB[..., None]), scale_RB, None)

    def _scale_field(self, amax_RB: Tensor) -> Tensor:
        """Each block's e + 127, int32 [R, B]; any number where amax is NaN."""
        one, emax = 1 << FP32_MANTISSA_BITS, self.element.emax
        if self.scale_rule == "rceil":
            amax_RB, emax = amax_RB / self.element.largest, 0
            # Bits of FP32 subnormals do not say their exponent; these round up to E8M0's least.
            amax_RB = amax_RB * (amax_RB > E8M0_SMALLEST)
        carry = {
            "floor": 0,
            "ceil": one - 1,
            "rceil": one - 1,
            "even": one >> (self.element.mantissa_bits + 1),
        }[self.scale_rule]
        field_RB = (amax_RB.view(torch.int32) + carry) >> FP32_MANTISSA_BITS
        return (field_RB - emax).clamp(0, 2 * FP32_EXPONENT_BIAS - self.element.emax)


@dataclass(frozen=True, slots=True)
class MXFP8(_MX):
    """MXFP8 with E4M3 elements."""

    name: ClassVar[str] = "mxfp8"
    element: ClassVar[SmallFloat] = E4M3


@dataclass(frozen=True, slots=True)
class MXFP8E5M2(_MX):
    """MXFP8 with E5M2 elements: more range, less precision."""

    name: ClassVar[str] = "mxfp8_e5m2"
    element: ClassVar[SmallFloat] = E5M2


@dataclass(frozen=True, slots=True)
class MXFP6E3M2(_MX):
    """MXFP6 with E3M2 elements."""

    name: ClassVar[str] = "mxfp6_e3m2"
    element: ClassVar[SmallFloat] = E3M2


@dataclass(frozen=True, slots=True)
class MXFP6E2M3(_MX):
    """MXFP6 with E2M3 elements."""

    name: ClassVar[str] = "mxfp6_e2m3"
    element: ClassVar[SmallFloat] = E2M3


@dataclass(frozen=True, slots=True)
class MXFP4(_MX):
    """MXFP4: E2M1 elements."""

    name: ClassVar[str] = "mxfp4"
    element: ClassVar[SmallFloat] = E2M1
