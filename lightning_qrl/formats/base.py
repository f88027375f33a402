"""What a number format is: `Format`, and the two things it makes, `Scaled` and `Quantized`.

`scaled` is for computing (values exact in BF16, the outer scale apart), `fake_quantize` for looking
at the error, `quantize` for storing. All three describe the same numbers bit for bit:
`quantize(x).dequantize()` equals `fake_quantize(x)` equals `scaled(x).values * scaled(x).outer` for
an FP32 x.

Quantization runs along the last axis. No method takes part in autograd: what gradient passes
through a quantizer is the layer's choice.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, get_args

import torch
from torch import Tensor


class Element(Protocol):
    """A code space: how one stored code becomes a value."""

    def decode(self, codes: Tensor) -> Tensor:
        """The FP32 value of each code."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A quantized tensor ready for a matrix product: x ~ values * outer.

    Attributes:
        values: FP32 of x's shape, element times block scale, each exact in BF16.
        outer: FP32 that broadcasts against x: [] for one scale a tensor, [..., 1] for one a row;
            None where the format has none.
    """

    values: Tensor
    outer: Tensor | None

    def product(self) -> Tensor:
        """The quantized x: values * outer, FP32 of x's shape."""
        return self.values if self.outer is None else self.values * self.outer


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A quantized tensor as it is stored, one code a byte (codes of less than 8 bits not packed).

    Attributes:
        codes: uint8 of x's shape (int16 for 16-bit formats).
        block_scale: FP32 [..., ceil(n / block)], the value of each block's scale; None without.
        outer_scale: FP32 [] or [..., 1]; None where the format has none.
        element: what the codes mean.
        block: elements a block scale covers, along the last axis.
    """

    codes: Tensor
    block_scale: Tensor | None
    outer_scale: Tensor | None
    element: Element
    block: int = 1

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode the codes and apply both scales.

        Args:
            dtype: of the result.

        Returns:
            A tensor of x's shape.
        """
        values = self.element.decode(self.codes)
        if self.block_scale is not None:
            scale = self.block_scale.repeat_interleave(self.block, dim=-1)
            values = values * scale[..., : values.shape[-1]]
        return Scaled(values, self.outer_scale).product().to(dtype)


@dataclass(frozen=True, slots=True)
class Format(ABC):
    """A number format; the fields of a subclass are its options.

    A subclass sets `name` and `bits`. A field annotated with a `Literal` is checked against it.

    Attributes:
        name: what `get_format` knows it by.
        bits: stored bits a value, block scales included, outer scales not.
    """

    name: ClassVar[str]
    bits: ClassVar[float]

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: an option's value is not among those its `Literal` allows.
        """
        for option in fields(self):
            allowed = get_args(option.type)
            value = getattr(self, option.name)
            if allowed and value not in allowed:
                listed = ", ".join(map(str, allowed))
                hint = nearest(str(value), map(str, allowed))
                raise ValueError(f"{self.name}: {option.name}={value!r} is not {listed}{hint}")

    def __str__(self) -> str:
        """The name, and the options that differ from their defaults."""
        changed = [
            f"{option.name}={getattr(self, option.name)}"
            for option in fields(self)
            if getattr(self, option.name) != option.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name

    @abstractmethod
    def scaled(self, x: Tensor) -> Scaled:
        """Quantize for computing; the hot path.

        Args:
            x: floating point [..., n], n of any size.

        Returns:
            FP32 values of x's shape, and the outer scale.

        Raises:
            ValueError: x has no axis.
        """

    @abstractmethod
    def quantize(self, x: Tensor) -> Quantized:
        """Quantize for storing: codes and scales of x, floating point [..., n]."""

    @abstractmethod
    def codes(self) -> Tensor:
        """Every finite value an element can have, ascending: FP32 [codes]."""

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Quantize and dequantize.

        Args:
            x: floating point [..., n], n of any size.

        Returns:
            A tensor of x's shape and dtype, detached from x's graph.
        """
        return self.scaled(x).product().to(x.dtype)


def as_fp32(x: Tensor) -> Tensor:
    """Bring x into FP32, contiguous, outside of any graph; no copy if it is that already.

    Raises:
        ValueError: x has no axis to quantize along, or is not floating point.
    """
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(f"a format quantizes floats of shape [..., n], not {x.dtype} {[*x.shape]}")
    return x.detach().to(torch.float32).contiguous()


def finite_magnitudes(x: Tensor, nan: float) -> Tensor:
    """|x| in a new tensor, infinities replaced by 0 and NaN by `nan`."""
    return x.nan_to_num(nan=nan, posinf=0.0, neginf=0.0).abs_()


def outer_amax(magnitudes: Tensor, outer_scale: str) -> Tensor:
    """The largest finite magnitude of the tensor or of each row; 0 where there is none.

    Args:
        magnitudes: FP32 [..., n], non-negative, without infinities; NaN counts as 0.
        outer_scale: "tensor" or "row".

    Returns:
        FP32 [] for the tensor, [..., 1] for rows.
    """
    finite = magnitudes.nan_to_num(nan=0.0)
    if finite.shape[-1] == 0 or (outer_scale == "tensor" and finite.numel() == 0):
        shape = [] if outer_scale == "tensor" else [*finite.shape[:-1], 1]
        return finite.new_zeros(shape)
    return finite.amax() if outer_scale == "tensor" else finite.amax(-1, keepdim=True)


def nearest(word: str, known: Iterable[str]) -> str:
    """End an error message with the known words near to `word`; empty where none is near."""
    close = difflib.get_close_matches(word, list(known), n=2)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
