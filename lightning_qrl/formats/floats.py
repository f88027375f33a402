"""Small floats under FP32 scales, or powers of two: FP8, and e{X}m{Y} in general.

    scale = amax / largest     values = element(clamp(x / scale, +-largest))     x ~ values * scale

amax runs over the whole tensor (`outer_scale="tensor"`), over each row of the last axis ("row",
one scale a token, so that a token's numbers do not depend on its batch), or there is no scale
("none") and x itself is rounded. `e3m2` names the float of 3 exponent and 2 mantissa bits; `e4m3`
and `e5m2` are `fp8_e4m3` and `fp8_e5m2`.

With `block` [1, 128] or [128, 128], amax runs over each block and the scale is inside (as DeepSeek
has it: activations and gradients by the one, weights by the other). `block_scale` says what a scale
may be, and recipes say it outright, since RL drifts differently under the two: "fp32", or "e8m0",
the power of two at or above amax / largest (Transformer Engine's default, DeepSeek-V3.1's UE8M0).

The hardware sums 128 products of elements at a time, multiplies the sum with both scales and adds
it up, all in FP32. Here elements times scales are multiplied. With e8m0 these are exact in BF16,
with fp32 they have 24 bits, so that GEMMs run in FP32 (`wide`) and the operands are rounded once;
the two differ in the order and place of FP32 roundings, and in nothing else.

Source: FP8 Formats for Deep Learning (arXiv 2209.05433) and DeepSeek-V3 (arXiv 2412.19437), with
the current and block scaling of Transformer Engine and torchao's float8. Some kernels of both
multiply by 448 / amax, here x is divided by the scale that dequantization multiplies with: they
differ where that last bit decides.

Edges: a NaN stays a NaN and touches nothing else; where the elements have no NaN (all but FP8) it
makes its scale NaN, and so its tensor or row, and without a scale it is stored as 0. An infinity
counts for no amax and saturates. The scale is at least 2^-126, the smallest normal FP32, so that
zeros are not divided by zero and a tiny amax keeps a scale of full precision; below that the codes
lose range instead. It is at most so large that the largest element times it is finite.

Edges of blocks: a NaN makes its block NaN, see `blocks`. With e8m0 the scale is at most
2^(127 - emax), so that FP8 saturates above 2.98e38 and nowhere else. Values of blocks with amax
below 2^-117 or so may need bits below BF16's subnormals.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.blocks import (
    BlockFormat,
    block_amax,
    magnitudes,
    one_zero,
    outer_amax,
)
from lightning_qrl.formats.compiling import apart
from lightning_qrl.formats.low_bit import Element, Split
from lightning_qrl.formats.quantized import Block, Codec
from lightning_qrl.formats.scales import E8M0, FP32Scale
from lightning_qrl.formats.small_float import (
    FP32_EXPONENT_BIAS,
    FP32_EXPONENT_MASK,
    FP32_MANTISSA_BITS,
    SmallFloat,
)

SMALLEST_NORMAL = 2.0**-126
LARGEST = 3.4028e38  # a little less than FP32's, so that an element times its scale is finite


def split_outer(
    element: Element, outer_scale: str, x_RBK: Tensor, noise_RBK: Tensor | None
) -> Split:
    """Split a tensor under an outer scale alone."""
    if outer_scale == "none":
        return Split(element.round_(x_RBK.clone(), noise=noise_RBK), None, None)
    scratch_RBK = magnitudes(x_RBK, nan=0.0 if element.has_nan else math.nan)
    amax = outer_amax(scratch_RBK.flatten(1), outer_scale)
    outer = (amax / element.largest).clamp(SMALLEST_NORMAL, LARGEST / element.largest)
    values_RBK = x_RBK / (outer if outer_scale == "tensor" else outer[..., None])
    return Split(element.round_(values_RBK, scratch_RBK, noise_RBK), None, outer)


@dataclass(frozen=True, slots=True)
class _Recovered(SmallFloat):
    """Elements that come to `encode` as (element * scale) / scale, with the rounding of both."""

    @override
    def encode(self, elements: Tensor, sign_of: Tensor) -> Tensor:
        return SmallFloat.encode(self, self.round_(elements.clone()), sign_of)


@dataclass(frozen=True, slots=True)
class SmallFloatFormat(BlockFormat):
    """e{X}m{Y}: a small float of at most 8 bits.

    Args:
        exponent_bits: X, 1 to 7; from the name.
        mantissa_bits: Y, 0 to 6; from the name.
        outer_scale: one FP32 scale a tensor, one a row, or none, as with blocks.
        block: [1, 128] or [128, 128] share a scale; [1, 1] for no block scales.
        block_scale: any FP32 number, or powers of two.
    """

    exponent_bits: int = 4
    mantissa_bits: int = 3
    outer_scale: Literal["tensor", "row", "none"] = "tensor"
    block_scale: Literal["fp32", "e8m0"] = "fp32"

    fixed: ClassVar[tuple[str, ...]] = ("exponent_bits", "mantissa_bits")
    pattern: ClassVar[str] = r"e(?P<exponent_bits>[1-7])m(?P<mantissa_bits>[0-6])"
    blocks: ClassVar[tuple[Block, ...]] = ((1, 1), (1, 128), (128, 128))

    @override
    def __post_init__(self) -> None:
        super(SmallFloatFormat, self).__post_init__()
        if self.exponent_bits + self.mantissa_bits > 7:
            raise ValueError(f"{self.name} has more than 8 bits")
        if self.blocked and self.outer_scale != "none":
            raise ValueError(
                f"{self.name}: block={[*self.block]} and outer_scale={self.outer_scale} exclude "
                "each other; set outer_scale=none for one scale a block"
            )
        if not self.blocked and self.block_scale != "fp32":
            raise ValueError(
                f"{self.name}: block_scale={self.block_scale} needs a block, [1, 128] or [128, 128]"
            )

    @property
    @override
    def name(self) -> str:
        fp8 = "fp8_" if self.element.bits == 8 and self.exponent_bits in (4, 5) else ""
        return f"{fp8}e{self.exponent_bits}m{self.mantissa_bits}"

    @property
    def blocked(self) -> bool:
        """Whether each block has its scale."""
        return self.block != (1, 1)

    @property
    @override
    def bits(self) -> float:
        scale = self.scale_codec
        return self.element.bits + (scale.bits / math.prod(self.block) if scale else 0.0)

    @property
    @override
    def wide(self) -> bool:
        return self.blocked and self.block_scale == "fp32"

    @property
    @override
    def element(self) -> SmallFloat:
        kind = _Recovered if self.wide else SmallFloat
        return kind(self.exponent_bits, self.mantissa_bits)

    @property
    @override
    def scale_codec(self) -> Codec | None:
        if not self.blocked:
            return None
        return E8M0() if self.block_scale == "e8m0" else FP32Scale()

    @override
    def split(self, x_RBK: Tensor, noise_RBK: Tensor | None) -> Split:
        if not self.blocked:
            return split_outer(self.element, self.outer_scale, x_RBK, noise_RBK)
        scratch_RBK = magnitudes(x_RBK)
        scale_RB = apart(self._scale(self.share(torch.amax, block_amax(scratch_RBK))))
        values_RBK = x_RBK / scale_RB[..., None]
        values_RBK = self.element.round_(values_RBK, scratch_RBK, noise_RBK)
        return Split(one_zero(values_RBK.mul_(scale_RB[..., None])), scale_RB, None)

    def _scale(self, amax_RB: Tensor) -> Tensor:
        scale_RB, most = amax_RB / self.element.largest, LARGEST / self.element.largest
        if self.block_scale == "e8m0":
            scale_RB = _next_power_of_two(scale_RB)
            most = 2.0 ** (FP32_EXPONENT_BIAS - self.element.emax)
        return scale_RB.clamp(SMALLEST_NORMAL, most)


def _next_power_of_two(x: Tensor) -> Tensor:
    """The power of two at or above each FP32 number in [0, 2^127]; NaN for NaN."""
    below_one = (1 << FP32_MANTISSA_BITS) - 1  # adding it carries into the exponent
    bits = (x.view(torch.int32) + below_one) & FP32_EXPONENT_MASK
    return bits.view(torch.float32) + 0.0 * x
