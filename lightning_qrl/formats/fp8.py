"""FP8 with at most one FP32 scale a tensor or a row.

    scale = amax / 448        values = E4M3(clamp(x / scale, +-448))        x ~ values * scale

amax runs over the whole tensor (`outer_scale="tensor"`), over each row of the last axis ("row",
one scale a token, so that a token's numbers do not depend on its batch), or there is no scale
("none") and x itself is rounded.

Source: E4M3FN of Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), with the
current scaling of Transformer Engine and torchao float8. Those multiply by 448 / amax, here x is
divided by the scale that dequantization multiplies with: they differ where that last bit decides.

Edges: a NaN stays a NaN and touches nothing else; an infinity counts for no amax and saturates. The
scale is at least 2^-126, the smallest normal FP32, so that zeros are not divided by zero and a tiny
amax keeps a scale of full precision; below 448 * 2^-126 the codes lose range instead.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.base import (
    Format,
    Quantized,
    Scaled,
    as_fp32,
    finite_magnitudes,
    outer_amax,
)
from lightning_qrl.formats.small_float import E4M3, SmallFloat

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True, slots=True)
class _FP8(Format):
    """What FP8 formats share. A subclass names its element."""

    outer_scale: Literal["tensor", "row", "none"] = "tensor"

    bits: ClassVar[float] = 8.0
    element: ClassVar[SmallFloat]

    @override
    def scaled(self, x: Tensor) -> Scaled:
        x = as_fp32(x)
        if self.outer_scale == "none":
            return Scaled(self.element.round_(x.clone()), None)
        magnitudes = finite_magnitudes(x, nan=0.0)
        outer = outer_amax(magnitudes, self.outer_scale) / self.element.largest
        outer = outer.clamp_min_(SMALLEST_NORMAL)
        return Scaled(self.element.round_(x / outer, scratch=magnitudes), outer)

    @override
    def quantize(self, x: Tensor) -> Quantized:
        s = self.scaled(x)
        codes = self.element.encode(s.values, sign_of=x.detach())
        return Quantized(codes, None, s.outer, self.element)

    @override
    def codes(self) -> Tensor:
        return self.element.codes()


@dataclass(frozen=True, slots=True)
class FP8E4M3(_FP8):
    """FP8 E4M3: largest value 448, 3 mantissa bits.

    Args:
        outer_scale: one FP32 scale a tensor, one a row, or none.
    """

    name: ClassVar[str] = "fp8_e4m3"
    element: ClassVar[SmallFloat] = E4M3
