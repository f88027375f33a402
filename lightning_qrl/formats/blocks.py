"""Formats that scale short blocks along the last axis: the layout, the amax, the base class.

A block format quantizes K neighbouring elements against one small scale. A row whose length is no
multiple of K is filled up with zeros, which change no amax and are cut off again.

Non-finite input, the same for every block format: a NaN makes the scale of its block NaN, and so
that block, and no other, comes out as NaN. An infinity counts for no amax, neither the block's nor
the outer one; it saturates at the largest value of its block's scale, and its neighbours come
out as if it were 0. (OCP MX leaves both to the implementation.)

Shapes: `_bK` is [..., blocks, K], `_b1` is [..., blocks, 1].
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_qrl.formats.base import Format, Quantized, Scaled, as_fp32
from lightning_qrl.formats.small_float import SmallFloat


@dataclass(frozen=True, slots=True)
class BlockFormat(Format):
    """A format of small floats in blocks. A subclass says how a block is scaled and rounded.

    Attributes:
        element: the code space of an element.
        block: K, a power of two.
    """

    element: ClassVar[SmallFloat]
    block: ClassVar[int]

    @abstractmethod
    def quantize_blocks(self, x_bK: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scale and round.

        Args:
            x_bK: FP32 [..., blocks, K], contiguous; must not be overwritten.

        Returns:
            values_bK: element times block scale, FP32 [..., blocks, K].
            scale_b1: block scale, FP32 [..., blocks, 1].
            outer: FP32 [] or [..., 1], or None.
        """

    @override
    def scaled(self, x: Tensor) -> Scaled:
        values_bK, _, outer = self.quantize_blocks(to_blocks(as_fp32(x), self.block))
        return Scaled(from_blocks(values_bK, x.shape[-1]), outer)

    @override
    def quantize(self, x: Tensor) -> Quantized:
        values_bK, scale_b1, outer = self.quantize_blocks(to_blocks(as_fp32(x), self.block))
        # Exact: a value is the unrounded product of its element and its scale.
        elements_bK = torch.where(scale_b1 == 0, 0.0, values_bK / scale_b1)
        elements = from_blocks(elements_bK, x.shape[-1])
        codes = self.element.encode(elements, sign_of=x.detach())
        return Quantized(codes, scale_b1.squeeze(-1), outer, self.element, self.block)

    @override
    def codes(self) -> Tensor:
        return self.element.codes()


def to_blocks(x: Tensor, block: int) -> Tensor:
    """[..., n] to [..., ceil(n / block), block], zeros at the end; a view where none are needed."""
    blocks = math.ceil(x.shape[-1] / block)
    missing = blocks * block - x.shape[-1]
    if missing:
        x = functional.pad(x, (0, missing))
    return x.view(*x.shape[:-1], blocks, block)


def from_blocks(x_bK: Tensor, length: int) -> Tensor:
    """[..., blocks, K] to [..., length], contiguous."""
    blocks, block = x_bK.shape[-2:]
    return x_bK.view(*x_bK.shape[:-2], blocks * block)[..., :length].contiguous()


def block_amax(magnitudes_bK: Tensor) -> Tensor:
    """The largest magnitude of each block, NaN where the block holds one.

    Args:
        magnitudes_bK: FP32 [..., blocks, K], contiguous, non-negative.

    Returns:
        FP32 [..., blocks, 1].
    """
    if magnitudes_bK.device.type == "cpu":
        return fold(torch.maximum, magnitudes_bK)
    return magnitudes_bK.amax(-1, keepdim=True)


def fold(combine: Callable[[Tensor, Tensor], Tensor], x_bK: Tensor) -> Tensor:
    """Reduce each block: its halves, their halves, ... in one order for every shape and device.

    PyTorch's own reduction over 16 or 32 neighbours costs about ten elementwise passes on a CPU,
    this one about three: it shifts the whole array against itself, in long vectors, and
    computes along the way sums across blocks that nobody reads.

    Args:
        combine: an elementwise function of two tensors, such as `torch.add`.
        x_bK: [..., blocks, K], contiguous, K a power of two and at least 2.

    Returns:
        [..., blocks, 1].
    """
    half = x_bK.shape[-1] // 2
    flat = combine(x_bK[..., :half], x_bK[..., half:]).view(-1)
    shift = half // 2
    while shift:
        flat = combine(flat[:-shift], flat[shift:])
        shift //= 2
    return flat[::half].reshape(*x_bK.shape[:-1], 1)
