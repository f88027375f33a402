"""Formats that scale short blocks: the amax of blocks, and how block formats treat odd numbers.

A block format quantizes K neighbouring elements of a row against one small scale. A row whose
length is no multiple of K is filled up with zeros, which change no amax and are cut off again. With
two-dimensional blocks, K rows share a scale too: a matrix and its transpose then have the same
codes.

Non-finite input, the same for every block format: a NaN makes the scale of its block NaN, and so
that block, and no other, comes out as NaN. An infinity counts for no amax, neither the block's nor
the outer one; it saturates at the largest value of its block's scale, and its neighbours come
out as if it were 0; a block of infinities alone comes out as zeros, or next to it. (OCP MX leaves
both to the implementation.)

R rows, B blocks a row, K values a block of one row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.base import same
from lightning_qrl.formats.low_bit import LowBit
from lightning_qrl.formats.quantized import Block


@dataclass(frozen=True, slots=True)
class BlockFormat(LowBit):
    """A format whose block is an option. A subclass lists the shapes that it allows."""

    block: Block = (1, 1)

    blocks: ClassVar[tuple[Block, ...]]

    @override
    def __post_init__(self) -> None:
        super(BlockFormat, self).__post_init__()
        if isinstance(self.block, list):  # as YAML has it
            object.__setattr__(self, "block", tuple(self.block))
        if not any(same(self.block, known) for known in self.blocks):
            allowed = " or ".join(str(list(block)) for block in self.blocks)
            raise ValueError(f"{self.name}: block={self.block!r} is not {allowed}")

    def share(self, combine: Callable[..., Tensor], per_row_RB: Tensor) -> Tensor:
        """Combine what the rows of a block say, by `torch.amax` or `torch.sum`: [R, B] again."""
        rows = self.block[0]
        if rows == 1:
            return per_row_RB
        groups = per_row_RB.view(per_row_RB.shape[0] // rows, rows, per_row_RB.shape[-1])
        return combine(groups, dim=1, keepdim=True).expand_as(groups).flatten(0, 1)


def magnitudes(x: Tensor, nan: float = math.nan) -> Tensor:
    """|x| in a new tensor, with 0 for infinities and `nan` (itself, or 0) for NaN."""
    if torch.compiler.is_compiling():
        size = x.abs()
        return torch.where(size < math.inf if nan == 0 else size != math.inf, size, 0.0)
    return x.nan_to_num(nan=nan, posinf=0.0, neginf=0.0).abs_()


def block_amax(magnitudes_RBK: Tensor) -> Tensor:
    """The largest magnitude of each block of one row, NaN where the block holds one: [R, B].

    Args:
        magnitudes_RBK: FP32, contiguous, non-negative.
    """
    if magnitudes_RBK.device.type != "cpu" or torch.compiler.is_compiling():
        return magnitudes_RBK.amax(-1)
    return _fold(torch.maximum, magnitudes_RBK)


def block_sum(x_RBK: Tensor) -> Tensor:
    """The sum of each block of one row, in one order for every shape and device: [R, B]."""
    return x_RBK.sum(-1) if torch.compiler.is_compiling() else _fold(torch.add, x_RBK)


def outer_amax(magnitudes_RB: Tensor, outer_scale: str) -> Tensor:
    """The largest magnitude of the tensor or of each row; 0 where there is none.

    Args:
        magnitudes_RB: FP32, non-negative, without infinities; a NaN is the largest.
        outer_scale: "tensor" or "row".

    Returns:
        FP32 [] for the tensor, [R, 1] for rows.
    """
    rows, columns = magnitudes_RB.shape
    if columns == 0 or (outer_scale == "tensor" and rows == 0):
        return magnitudes_RB.new_zeros([] if outer_scale == "tensor" else [rows, 1])
    if outer_scale == "tensor":
        return magnitudes_RB.amax()
    return magnitudes_RB.amax(-1, keepdim=True)


def one_zero(values: Tensor) -> Tensor:
    """Turn -0, which a negative element under a zero scale gives, into 0; overwrites `values`."""
    if torch.compiler.is_compiling():  # which takes adding 0 for nothing
        return torch.where(values == 0, 0.0, values)
    return values.add_(0.0)


def _fold(combine: Callable[[Tensor, Tensor], Tensor], x_RBK: Tensor) -> Tensor:
    """Reduce each block: its halves, their halves, ... in one order for every shape.

    PyTorch's own reduction over 16 or 32 neighbours costs about ten elementwise passes on a CPU,
    this one about three: it shifts the whole array against itself, in long vectors, and
    computes along the way sums across blocks that nobody reads.
    """
    half = x_RBK.shape[-1] // 2
    flat = combine(x_RBK[..., :half], x_RBK[..., half:]).view(-1)
    shift = half // 2
    while shift:
        flat = combine(flat[:-shift], flat[shift:])
        shift //= 2
    return flat[::half].reshape(x_RBK.shape[:-1])
