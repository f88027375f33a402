"""A quantized tensor as it is stored: packed element codes and the codes of its scales.

Two 4-bit codes take a byte, an E4M3 or E8M0 scale takes one, so a stored tensor has the size that
its format says. `dequantize` gives back the numbers that `Format.fake_quantize` gives.

R rows, n values a row (stored; whole rotations where there is one), K values a block.
"""

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_qrl.formats.compiling import apart, compiled
from lightning_qrl.formats.hadamard import Hadamard
from lightning_qrl.formats.packing import pack, unpack
from lightning_qrl.formats.scaled import Scaled

Block = tuple[int, int]


class Codec(Hashable, Protocol):
    """A code space: how values become stored codes, and codes values."""

    @property
    def bits(self) -> int:
        """Width of a code."""
        ...

    def encode(self, elements: Tensor, sign_of: Tensor) -> Tensor:
        """The code of each representable value; zeros take the sign of `sign_of`."""
        ...

    def decode(self, codes: Tensor) -> Tensor:
        """The FP32 value of each code."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """What the bytes of a `Quantized` mean.

    Attributes:
        element: code space of the elements.
        scale: code space of the block scales; None without block scales.
        block: rows and columns that share a block scale.
        rotation: size of the Hadamard rotation that the elements are in.
    """

    element: Codec
    scale: Codec | None = None
    block: Block = (1, 1)
    rotation: Hadamard = "none"


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A quantized tensor [..., n].

    Attributes:
        packed: uint8 [..., bytes], see `packing`; int16 [..., n] for 16-bit formats.
        scale_codes: uint8, bfloat16 or FP32 [..., ceil(R / rows), ceil(n / K)]; None without block
            scales.
        outer_scale: FP32 [] or [..., 1]; None where the format has none.
        layout: what they mean.
        shape: of x.
    """

    packed: Tensor
    scale_codes: Tensor | None
    outer_scale: Tensor | None
    layout: Layout
    shape: torch.Size

    @property
    def stored_length(self) -> int:
        """Codes a row."""
        size = self.layout.rotation
        return self.shape[-1] if size == "none" else math.ceil(self.shape[-1] / size) * size

    @property
    def codes(self) -> Tensor:
        """One code a value, uint8 [..., n] (int16 for 16-bit formats)."""
        if self.packed.dtype == torch.int16:
            return self.packed
        return unpack(self.packed, self.layout.element.bits, self.stored_length)

    @property
    def block_scale(self) -> Tensor | None:
        """The value of each block's scale, FP32; None without block scales."""
        if self.layout.scale is None or self.scale_codes is None:
            return None
        return self.layout.scale.decode(self.scale_codes)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of all scales."""
        parts = (self.packed, self.scale_codes, self.outer_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def values(self) -> Tensor:
        """Element times block scale, FP32 [..., n], in the rotated basis where there is one."""
        if self.packed.dtype == torch.int16:
            return self.layout.element.decode(self.packed)
        return decode(self.layout, self.packed, self.scale_codes, self.stored_length)

    def scaled(self) -> Scaled:
        """The same numbers for computing."""
        return Scaled(self.values(), self.outer_scale, self.layout.rotation, self.shape[-1])

    def quantized(self) -> "Quantized":
        """Itself: what is stored can be multiplied like any other operand."""
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode the codes, apply the scales, rotate back: [..., n] of x's shape in `dtype`."""
        return self.scaled().product().to(dtype)


def encode(layout: Layout, values: Tensor, scale: Tensor | None, sign_of: Tensor) -> Tensor:
    """The packed codes of values = element * block scale.

    Args:
        layout: the code spaces.
        values: FP32 [..., n].
        scale: FP32 [..., R, blocks] as `Split` has it, one a row; None without block scales.
        sign_of: FP32 [..., n].

    Returns:
        uint8 [..., bytes].
    """
    block, length = layout.block[1], values.shape[-1]
    if length % block == 0 and values.numel():
        per_block = None if scale is None else scale.reshape(-1)
        codes = _encode(layout, values.view(-1), per_block, sign_of.view(-1)).view(values.shape)
    else:
        if scale is not None:
            values = values / _divisor(_spread(scale, block, length))
        codes = layout.element.encode(values, sign_of)
    return pack(codes, layout.element.bits)


def decode(layout: Layout, packed: Tensor, scale_codes: Tensor | None, length: int) -> Tensor:
    """Undo `encode`: element times block scale, FP32 [..., n].

    Args:
        layout: the code spaces.
        packed: uint8 [..., bytes].
        scale_codes: as `Quantized` has them.
        length: n.
    """
    values = _elements(layout.element, packed, length)
    if layout.scale is None or scale_codes is None:
        return values
    rows, block = layout.block
    scale = _look_up(layout.scale, scale_codes)
    if rows > 1 and values.ndim > 1:
        scale = scale.repeat_interleave(rows, -2)[..., : values.shape[-2], :]
    if length % block == 0 and values.numel():
        values.view(-1, block).mul_(scale.reshape(-1, 1))
        return values
    return values.mul_(_spread(scale, block, length).view(values.shape))


@compiled()
def _encode(layout: Layout, values: Tensor, scale: Tensor | None, sign_of: Tensor) -> Tensor:
    """Flat, in whole blocks, one code a byte."""
    if scale is not None:
        values_bK = values.view(-1, layout.block[1])
        values = (values_bK / apart(_divisor(scale.view(-1, 1)))).view(-1)
    return layout.element.encode(values, sign_of)


def _elements(element: Codec, packed: Tensor, length: int) -> Tensor:
    """The element of each code, in a new tensor: FP32 [..., n]."""
    if element.bits != 4:
        return _look_up(element, unpack(packed, element.bits, length))
    table = _table(element, packed.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], -1).view(torch.int64)
    both = pairs.view(-1).index_select(0, packed.reshape(-1).int()).view(packed.shape)
    return both.view(torch.float32)[..., :length].contiguous()


def _look_up(codec: Codec, codes: Tensor) -> Tensor:
    """Decode by a table where there are few codes: one pass over many elements."""
    if codec.bits > 8:
        return codec.decode(codes)
    table = _table(codec, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@functools.cache
def _table(codec: Codec, device: torch.device) -> Tensor:
    """What each code is worth."""
    with torch.inference_mode(False):
        codes = torch.arange(1 << codec.bits, device=device).to(torch.uint8)
        return codec.decode(codes)


def _divisor(scale: Tensor) -> Tensor:
    """What values are divided by for their elements.

    Exact where they are unrounded products; under FP32 scales the element's codec rounds.
    """
    return torch.where(scale == 0, 1.0, scale)


def _spread(scale: Tensor, block: int, length: int) -> Tensor:
    return scale.repeat_interleave(block, -1)[..., :length]
