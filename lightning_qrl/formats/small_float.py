"""Small floats: a sign, E exponent bits, M mantissa bits, and rounding to them in four passes.

With bias b = 2^(E-1) - 1, a code is worth (1 + mantissa / 2^M) * 2^(exponent - b), or, where its
exponent field is 0, mantissa / 2^M * 2^(1 - b). E2M1 (FP4) and E4M3FN (FP8) are the OCP ones: they
have no infinities, so a value beyond the largest saturates; E4M3FN keeps its last code for NaN.

Rounding to nearest, ties to even, is done by the FP32 adder. Neighbours within the binade
[2^e, 2^(e+1)) lie 2^(e-M) apart, below the smallest normal 2^(1-b-M) apart. Around
c = 1.5 * 2^(23-M) * 2^e FP32 numbers have that very spacing, so (v + c) - c rounds v. Masking the
exponent bits of v gives 2^e.

Deviation: a value that rounds to zero comes out as +0. Hardware keeps the sign of a zero; a matrix
product cannot tell. `encode` puts the sign back, so that stored codes are those of the hardware,
and `decode` drops it again.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3; checked against ml_dtypes over every code,
every midpoint and both FP32 neighbours of each midpoint.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

FP32_MANTISSA_BITS = 23
FP32_EXPONENT_BIAS = 127
FP32_EXPONENT_MASK = 0x7F800000


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A signed float of at most 8 bits without infinities.

    Args:
        exponent_bits: E, at least 2.
        mantissa_bits: M, at least 1.
        largest: the largest finite value; codes above its code are NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    largest: float

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal value."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def emax(self) -> int:
        """The exponent of the largest value."""
        return math.frexp(self.largest)[1] - 1

    def round_(self, values: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Round to the nearest representable value, ties to even, saturating; NaN stays NaN.

        Args:
            values: FP32, any shape. Overwritten.
            scratch: FP32 of the same shape and strides, overwritten too; saves an allocation, which
                costs more than a pass over a large tensor.

        Returns:
            `values`.
        """
        values.clamp_(-self.largest, self.largest)
        floor = (self.emin + FP32_EXPONENT_BIAS) << FP32_MANTISSA_BITS
        scratch = torch.empty_like(values) if scratch is None else scratch
        bits = scratch.view(torch.int32)
        torch.bitwise_and(values.view(torch.int32), FP32_EXPONENT_MASK, out=bits).clamp_min_(floor)
        # alpha * scratch is exact, so a fused multiply-add gives the same sum.
        alpha = 1.5 * 2.0 ** (FP32_MANTISSA_BITS - self.mantissa_bits)
        return values.add_(scratch, alpha=alpha).sub_(scratch, alpha=alpha)

    def codes(self) -> Tensor:
        """Every representable finite value, ascending, one zero.

        Returns:
            FP32 [codes].
        """
        magnitudes = _magnitudes(self)
        return torch.tensor([-v for v in magnitudes[:0:-1]] + list(magnitudes))

    def encode(self, elements: Tensor, sign_of: Tensor) -> Tensor:
        """The code of each element: sign, exponent, mantissa in the low bits of a byte.

        Args:
            elements: FP32, any shape, representable values. A NaN becomes the NaN code, or 0 where
                the format has none.
            sign_of: the same shape; its sign bits are stored, so that zeros keep theirs.

        Returns:
            uint8, the same shape.
        """
        magnitudes = torch.tensor(_magnitudes(self), device=elements.device)
        # Magnitudes ascend with their codes; a NaN sorts behind them all, at the NaN code.
        codes = torch.searchsorted(magnitudes, elements.abs().contiguous())
        sign_bit = 1 << (self.exponent_bits + self.mantissa_bits)
        codes = codes % sign_bit + torch.signbit(sign_of) * sign_bit
        return codes.to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The value of each code; both zeros give +0, codes above the largest give NaN.

        Args:
            codes: uint8, any shape.

        Returns:
            FP32, the same shape.
        """
        half = 1 << (self.exponent_bits + self.mantissa_bits)
        magnitudes = list(_magnitudes(self))
        magnitudes += [math.nan] * (half - len(magnitudes))
        table = torch.tensor([*magnitudes, 0.0, *(-v for v in magnitudes[1:])], device=codes.device)
        return table[codes.int()]


@functools.cache
def _magnitudes(element: SmallFloat) -> tuple[float, ...]:
    """The non-negative finite values in the order of their codes."""
    steps = 2**element.mantissa_bits
    values = [m / steps * 2.0**element.emin for m in range(steps)]
    for exponent in range(element.emin, element.emax + 1):
        values += [(1 + m / steps) * 2.0**exponent for m in range(steps)]
    return tuple(v for v in values if v <= element.largest)


E2M1 = SmallFloat(exponent_bits=2, mantissa_bits=1, largest=6.0)
E4M3 = SmallFloat(exponent_bits=4, mantissa_bits=3, largest=448.0)
