"""Small floats with at most one FP32 scale a tensor or a row: FP8, and e{X}m{Y} in general.

    scale = amax / largest     values = element(clamp(x / scale, +-largest))     x ~ values * scale

amax runs over the whole tensor (`outer_scale="tensor"`), over each row of the last axis ("row",
one scale a token, so that a token's numbers do not depend on its batch), or there is no scale
("none") and x itself is rounded. `e3m2` names the float of 3 exponent and 2 mantissa bits; `e4m3`
and `e5m2` are `fp8_e4m3` and `fp8_e5m2`.

Source: FP8 Formats for Deep Learning (arXiv 2209.05433), with the current scaling of Transformer
Engine and torchao float8. Those multiply by 448 / amax, here x is divided by the scale that
dequantization multiplies with: they differ where that last bit decides.

Edges: a NaN stays a NaN and touches nothing else; where the elements have no NaN (all but FP8) it
makes its scale NaN, and so its tensor or row, and without a scale it is stored as 0. An infinity
counts for no amax and saturates. The scale is at least 2^-126, the smallest normal FP32, so that
zeros are not divided by zero and a tiny amax keeps a scale of full precision; below that the codes
lose range instead.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.blocks import magnitudes, outer_amax
from lightning_qrl.formats.low_bit import Element, LowBit, Split
from lightning_qrl.formats.small_float import SmallFloat

SMALLEST_NORMAL = 2.0**-126


def split_outer(
    element: Element, outer_scale: str, x_RBK: Tensor, noise_RBK: Tensor | None
) -> Split:
    """Split a tensor under an outer scale alone."""
    if outer_scale == "none":
        return Split(element.round_(x_RBK.clone(), noise=noise_RBK), None, None)
    scratch_RBK = magnitudes(x_RBK)
    amax = outer_amax(scratch_RBK.flatten(1), outer_scale, skip_nan=element.has_nan)
    outer = amax / element.largest
    outer = outer.clamp_min(SMALLEST_NORMAL)
    values_RBK = x_RBK / (outer if outer_scale == "tensor" else outer[..., None])
    return Split(element.round_(values_RBK, scratch_RBK, noise_RBK), None, outer)


@dataclass(frozen=True, slots=True)
class SmallFloatFormat(LowBit):
    """e{X}m{Y}: a small float of at most 8 bits.

    Args:
        exponent_bits: X, 1 to 7; from the name.
        mantissa_bits: Y, 0 to 6; from the name.
        outer_scale: one FP32 scale a tensor, one a row, or none.
    """

    exponent_bits: int = 4
    mantissa_bits: int = 3
    outer_scale: Literal["tensor", "row", "none"] = "tensor"

    fixed: ClassVar[tuple[str, ...]] = ("exponent_bits", "mantissa_bits")
    pattern: ClassVar[str] = r"e(?P<exponent_bits>[1-7])m(?P<mantissa_bits>[0-6])"

    @override
    def __post_init__(self) -> None:
        super(SmallFloatFormat, self).__post_init__()
        if self.exponent_bits + self.mantissa_bits > 7:
            raise ValueError(f"{self.name} has more than 8 bits")

    @property
    @override
    def name(self) -> str:
        fp8 = "fp8_" if self.element.bits == 8 and self.exponent_bits in (4, 5) else ""
        return f"{fp8}e{self.exponent_bits}m{self.mantissa_bits}"

    @property
    @override
    def bits(self) -> float:
        return float(self.element.bits)

    @property
    @override
    def element(self) -> SmallFloat:
        return SmallFloat(self.exponent_bits, self.mantissa_bits)

    @override
    def split(self, x_RBK: Tensor, noise_RBK: Tensor | None) -> Split:
        return split_outer(self.element, self.outer_scale, x_RBK, noise_RBK)
