"""What a number format is: `Format`, and the two things it makes, `Scaled` and `Quantized`.

`scaled` is for computing (values exact in BF16, the outer scale apart), `fake_quantize` for looking
at the error, `quantize` for storing. All three describe the same numbers bit for bit:
`quantize(x).dequantize()` equals `fake_quantize(x)` equals `scaled(x).product()` for an FP32 x.

Quantization runs along the last axis. No method takes part in autograd: what gradient passes
through a quantizer is the layer's choice.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import Field, dataclass, fields
from typing import ClassVar, Literal, Protocol, get_args, get_origin

import torch
from torch import Tensor

from lightning_qrl.formats.quantized import Quantized
from lightning_qrl.formats.scaled import Scaled


class Operand(Protocol):
    """A tensor that was quantized once, as it is asked for."""

    def scaled(self) -> Scaled:
        """Its numbers, for computing."""
        ...

    def quantized(self) -> Quantized:
        """Its codes and scales, for storing and for the chip's own units; made when asked for."""
        ...


@dataclass(frozen=True, slots=True)
class Format(ABC):
    """A number format; the fields of a subclass are its options.

    A field annotated with a `Literal` is checked against it.
    """

    fixed: ClassVar[tuple[str, ...]] = ()  # fields that the name decides, no options

    @property
    @abstractmethod
    def name(self) -> str:
        """What `get_format` knows it by."""

    @property
    @abstractmethod
    def bits(self) -> float:
        """Stored bits a value, block scales included, outer scales not."""

    @property
    def elementwise(self) -> bool:
        """Whether each element is rounded by itself, so that a transpose needs no new rounding."""
        return False

    @property
    def wide(self) -> bool:
        """Whether values have more significant bits than BF16: their GEMMs then run in FP32."""
        return False

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: an option's value is not among those its `Literal` allows.
        """
        for option in fields(self):
            allowed = get_args(option.type) if get_origin(option.type) is Literal else ()
            value = getattr(self, option.name)
            if allowed and not any(same(value, known) for known in allowed):
                listed = ", ".join(map(str, allowed))
                hint = nearest(str(value), map(str, allowed))
                raise ValueError(f"{self.name}: {option.name}={value!r} is not {listed}{hint}")

    @classmethod
    def options(cls) -> tuple[Field[object], ...]:
        """The fields that a user may set."""
        return tuple(option for option in fields(cls) if option.name not in cls.fixed)

    def __str__(self) -> str:
        """The name, and the options that differ from their defaults."""
        changed = [
            f"{option.name}={_show(getattr(self, option.name))}"
            for option in self.options()
            if getattr(self, option.name) != option.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name

    @abstractmethod
    def operand(self, x: Tensor, generator: torch.Generator | None = None) -> Operand:
        """Quantize once, to be taken as numbers, as codes, or as both.

        Args:
            x: floating point [..., n], n of any size.
            generator: of the noise of stochastic rounding; the module `rounding` has a default.

        Raises:
            ValueError: x has no axis, or is not floating point.
        """

    @abstractmethod
    def codes(self) -> Tensor:
        """Every finite value an element can have, ascending: FP32 [codes]."""

    def scaled(self, x: Tensor, generator: torch.Generator | None = None) -> Scaled:
        """Quantize for computing; the hot path. Takes and raises what `operand` does.

        Returns:
            FP32 values of x's shape, and the outer scale.
        """
        return self.operand(x, generator).scaled()

    def quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Quantized:
        """Quantize for storing: packed codes and scales. Takes and raises what `operand` does."""
        return self.operand(x, generator).quantized()

    def fake_quantize(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Quantize and dequantize.

        Args:
            x: floating point [..., n], n of any size.
            generator: of the noise of stochastic rounding.

        Returns:
            A tensor of x's shape and dtype, detached from x's graph.
        """
        return self.scaled(x, generator).product().to(x.dtype)


def as_fp32(x: Tensor) -> Tensor:
    """Bring x into FP32, contiguous, outside of any graph; no copy if it is that already.

    Raises:
        ValueError: x has no axis to quantize along, or is not floating point.
    """
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(f"a format quantizes floats of shape [..., n], not {x.dtype} {[*x.shape]}")
    return x.detach().to(torch.float32).contiguous()


def same(value: object, known: object) -> bool:
    """Whether they are equal and of one type: 16.0 and True are no options where 16 and 1 are."""
    if isinstance(value, tuple) and isinstance(known, tuple):
        return len(value) == len(known) and all(map(same, value, known))
    return type(value) is type(known) and value == known


def nearest(word: str, known: Iterable[str]) -> str:
    """End an error message with the known words near to `word`; empty where none is near."""
    close = difflib.get_close_matches(word, list(known), n=2)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _show(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
