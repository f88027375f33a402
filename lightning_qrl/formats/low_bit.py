"""Formats of 8 bits or fewer: what they share around the one function that makes them differ.

    x  ->  FP32  ->  rotated (hadamard)  ->  `split`: values, block scales, outer scale
                                               |-> Scaled: as they are
                                               '-> Quantized: encoded and packed

A family says how a tensor is split, in a pure function of [R, n] that also compiles.

R rows, n values a row, B blocks a row.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_qrl.formats.base import Format, Operand, as_fp32
from lightning_qrl.formats.compiling import compiled
from lightning_qrl.formats.hadamard import Hadamard, rotate
from lightning_qrl.formats.quantized import Block, Codec, Layout, Quantized, encode
from lightning_qrl.formats.rounding import Rounding, noise_for
from lightning_qrl.formats.scaled import Scaled


class Element(Codec, Protocol):
    """The code space of an element, and rounding to it."""

    @property
    def largest(self) -> float:
        """The largest value."""
        ...

    @property
    def smallest(self) -> float:
        """The smallest value above zero."""
        ...

    @property
    def has_nan(self) -> bool:
        """Whether a code says NaN."""
        ...

    def round_(
        self, values: Tensor, scratch: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Round to representable values, saturating; may overwrite `values` and `scratch`."""
        ...

    def codes(self) -> Tensor:
        """Every finite value, ascending."""
        ...


class Split(NamedTuple):
    """A tensor in parts: x ~ values * outer, values = element * block scale."""

    values: Tensor  # FP32 [R, B, K]
    scale: Tensor | None  # FP32 [R, B], the same in the rows that share it
    outer: Tensor | None  # FP32 [] or [R, 1]


@dataclass(frozen=True, slots=True)
class LowBit(Format):
    """A format of few-bit elements.

    Args:
        rounding: of the elements, to the nearest (ties to even) or stochastic.
        hadamard: rotate by a random Hadamard transform of this size before quantizing.
    """

    rounding: Rounding = "nearest"
    hadamard: Hadamard = "none"

    @property
    def scale_codec(self) -> Codec | None:
        """The code space of a block scale; None in formats without."""
        return None

    @property
    def block(self) -> Block:
        """Rows and columns that share a block scale; an option of the formats that have one."""
        return (1, 1)

    @property
    @abstractmethod
    def element(self) -> Element:
        """The code space of an element."""

    @abstractmethod
    def split(self, x_RBK: Tensor, noise_RBK: Tensor | None) -> Split:
        """Scale and round; pure, in operations that also compile.

        Args:
            x_RBK: FP32, contiguous; must not be overwritten.
            noise_RBK: uniform in [0, 1) for stochastic rounding, or None.
        """

    @override
    def operand(self, x: Tensor, generator: torch.Generator | None = None) -> Operand:
        parts, turned = self._parts(x, generator)
        return _Operand(self, parts, turned, x.shape)

    @override
    def codes(self) -> Tensor:
        return self.element.codes()

    @property
    def layout(self) -> Layout:
        """What the bytes of its quantized tensors mean."""
        return Layout(self.element, self.scale_codec, self.block, self.hadamard)

    def _parts(self, x: Tensor, generator: torch.Generator | None) -> tuple[Split, Tensor]:
        """The parts with x's leading axes, and what was quantized: x in FP32, rotated."""
        turned = rotate(as_fp32(x), self.hadamard)
        rows, size = self.block
        matrix = turned if turned.ndim > 1 else turned[None]
        height, length = matrix.shape[-2:]
        missing = (0, -length % size, 0, -height % rows)
        padded = functional.pad(matrix, missing) if any(missing) else matrix
        lead = padded.shape[:-1]
        x_RBK = padded.view(math.prod(lead), padded.shape[-1] // size, size)
        values, scale, outer = _split(self, x_RBK, noise_for(x_RBK, self.rounding, generator))
        values = values.view(padded.shape)[..., :height, :length].contiguous().view(turned.shape)
        if scale is not None:
            blocks = scale.shape[-1]
            scale = scale.view(*lead, blocks)[..., :height, :].reshape(*turned.shape[:-1], blocks)
        if outer is not None and outer.ndim:
            outer = outer.view(*lead, 1)[..., :height, :].reshape(*x.shape[:-1], 1)
        return Split(values, scale, outer), turned


@dataclass(slots=True, eq=False)
class _Operand:
    """The parts of a tensor; `turned` is what was split, in FP32 and rotated."""

    format: LowBit
    parts: Split
    turned: Tensor
    shape: torch.Size
    stored: Quantized | None = None  # once asked for

    def scaled(self) -> Scaled:
        return Scaled(self.parts.values, self.parts.outer, self.format.hadamard, self.shape[-1])

    def quantized(self) -> Quantized:
        if self.stored is None:
            values, scale, outer = self.parts
            layout, codes = self.format.layout, None
            if layout.scale is not None and scale is not None:
                one_RB = scale[..., :: layout.block[0], :] if len(self.shape) > 1 else scale
                codes = layout.scale.encode(one_RB.contiguous(), one_RB.abs())  # a NaN has a sign
            packed = encode(layout, values, scale, self.turned)
            self.stored = Quantized(packed, codes, outer, layout, self.shape)
        return self.stored


@compiled(odd=True)
def _split(format: LowBit, x_RBK: Tensor, noise_RBK: Tensor | None) -> Split:
    return format.split(x_RBK, noise_RBK)
