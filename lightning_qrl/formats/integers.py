"""Symmetric integers: INT8, INT4, INT3, INT2, with one scale a tensor, a row or a group.

    scale = amax / largest      element = RNE(clamp(x / scale, +-largest))      x ~ element * scale

largest = 2^(bits - 1) - 1: the code -2^(bits - 1) is left out, so that the values are symmetric.
The scale is FP32 and outside (`outer_scale: tensor | row`), or, with `block: [1, N]`, one BF16
scale for N neighbours of a row, as weight-only INT4 checkpoints store it (compressed-tensors,
Marlin). The two exclude each other.

An integer times a BF16 group scale needs up to 15 bits: exact in FP32, rounded once where a layer
computes in BF16, which is what a kernel that dequantizes to BF16 does. Without groups the values
are the integers, exact in BF16.

Edges: as in `floats` for an outer scale and as in `blocks` for groups. A group whose scale is below
the smallest BF16, amax < 9e-41 * largest / 2, comes out as zeros.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.blocks import magnitudes, one_zero
from lightning_qrl.formats.compiling import apart, as_bytes, is_number
from lightning_qrl.formats.floats import split_outer
from lightning_qrl.formats.low_bit import LowBit, Split
from lightning_qrl.formats.quantized import Block, Codec
from lightning_qrl.formats.rounding import up_or_down_
from lightning_qrl.formats.scales import BF16Scale

LARGEST_BF16 = 3.38e38  # a little less, so that an element times its scale is finite in FP32


@dataclass(frozen=True, slots=True)
class SignedInt:
    """Integers -largest .. largest, stored in two's complement.

    Args:
        bits: 2 to 8.
    """

    bits: int

    smallest: ClassVar[float] = 1.0
    has_nan: ClassVar[bool] = False

    @property
    def largest(self) -> float:
        """2^(bits - 1) - 1."""
        return float((1 << (self.bits - 1)) - 1)

    def round_(
        self, values: Tensor, scratch: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Round to integers, saturating; overwrites `values`; NaN stays NaN.

        Args:
            values: FP32, any shape.
            scratch: not used; small floats do.
            noise: uniform in [0, 1) for stochastic rounding; None rounds to the nearest, ties to
                even.
        """
        values = values.clamp_(-self.largest, self.largest)
        values = values.round_() if noise is None else up_or_down_(values, noise)
        return values.add_(0.0)  # one zero

    def codes(self) -> Tensor:
        """Every integer, ascending: FP32 [codes]."""
        return torch.arange(-self.largest, self.largest + 1)

    def encode(self, elements: Tensor, sign_of: Tensor) -> Tensor:
        """Two's complement in the low bits of a byte; 0 for NaN. An integer 0 has no sign."""
        numbers = torch.where(is_number(elements), elements, 0.0).int()
        return as_bytes(numbers & ((1 << self.bits) - 1))

    def decode(self, codes: Tensor) -> Tensor:
        """The FP32 value of each code."""
        sign_bit = 1 << (self.bits - 1)
        return ((codes.int() ^ sign_bit) - sign_bit).float()


@dataclass(frozen=True, slots=True)
class _Int(LowBit):
    """What the integers share. A subclass names itself and its width."""

    outer_scale: Literal["tensor", "row", "none"] = "row"
    block: Block = (1, 1)

    width: ClassVar[int]
    scale_codec: ClassVar[Codec | None] = BF16Scale()

    @override
    def __post_init__(self) -> None:
        super(_Int, self).__post_init__()
        block = tuple(self.block) if isinstance(self.block, list | tuple) else (self.block,)
        object.__setattr__(self, "block", block)  # a list, in YAML
        if len(block) != 2 or block[0] != 1 or not isinstance(block[1], int) or block[1] < 1:
            raise ValueError(f"{self.name}: block={[*block]} is not [1, N], N values of a row")
        if self.grouped and self.outer_scale != "none":
            raise ValueError(
                f"{self.name}: block={[*block]} and outer_scale={self.outer_scale} exclude each "
                "other; set outer_scale=none for one scale a group"
            )

    @property
    def grouped(self) -> bool:
        """Whether each group of a row has its scale."""
        return self.block != (1, 1)

    @property
    @override
    def bits(self) -> float:
        return self.width + (16 / self.block[1] if self.grouped else 0.0)

    @property
    @override
    def element(self) -> SignedInt:
        return SignedInt(self.width)

    @override
    def split(self, x_RBK: Tensor, noise_RBK: Tensor | None) -> Split:
        if not self.grouped:
            return split_outer(self.element, self.outer_scale, x_RBK, noise_RBK)
        amax_RB, largest = magnitudes(x_RBK).amax(-1), self.element.largest
        ideal_RB = (amax_RB / largest).clamp_max(LARGEST_BF16 / largest)
        scale_RB = apart(_round_to_bf16(ideal_RB))
        # Under a zero scale all comes out as zeros, whatever the element is.
        divisor_RB = torch.where(scale_RB == 0, 1.0, scale_RB)
        elements_RBK = self.element.round_(x_RBK / divisor_RB[..., None], noise=noise_RBK)
        return Split(one_zero(elements_RBK * scale_RB[..., None]), scale_RB, None)


def _round_to_bf16(scale: Tensor) -> Tensor:
    """To the nearest BF16, ties to even, in FP32; a compiler would elide the pair of casts."""
    bits = scale.view(torch.int32)
    odd = (bits >> 16) & 1
    rounded = ((bits + 0x7FFF + odd) & -0x10000).view(torch.float32)
    return rounded + 0.0 * scale  # NaN, whose bits may overflow


@dataclass(frozen=True, slots=True)
class INT8(_Int):
    """INT8, -127 to 127."""

    name: ClassVar[str] = "int8"
    width: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class INT4(_Int):
    """INT4, -7 to 7."""

    name: ClassVar[str] = "int4"
    width: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class INT3(_Int):
    """INT3, -3 to 3."""

    name: ClassVar[str] = "int3"
    width: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class INT2(_Int):
    """INT2, -1 to 1: ternary."""

    name: ClassVar[str] = "int2"
    width: ClassVar[int] = 2
