"""Small floats: a sign, E exponent bits, M mantissa bits, and rounding to them in four passes.

With bias b = 2^(E-1) - 1, a code is worth (1 + mantissa / 2^M) * 2^(exponent - b), or, where its
exponent field is 0, mantissa / 2^M * 2^(1 - b). Every code is a number, as in the elements of OCP
MX, save two: E4M3 keeps its last code for NaN, and E5M2 its last exponent for NaN and infinity. A
value beyond the largest saturates.

Rounding to nearest, ties to even, is done by the FP32 adder. Neighbours within the binade
[2^e, 2^(e+1)) lie 2^(e-M) apart, below the smallest normal 2^(1-b-M) apart. Around
c = 1.5 * 2^(23-M) * 2^e FP32 numbers have that very spacing, so (v + c) - c rounds v. Masking the
exponent bits of v gives 2^e. (Without mantissa bits a tie between two powers of two goes to the
larger, as IEEE 754 has it for one digit.)

Rounding stochastically takes the gap g = 2^(e-M) and rounds v / g up or down (see `rounding`).

Deviation: a value that rounds to zero comes out as +0. Hardware keeps the sign of a zero; a matrix
product cannot tell. `encode` puts the sign back, so that stored codes are those of the hardware,
and `decode` drops it again.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3, and OCP FP8; checked against ml_dtypes over
every code, every midpoint and both FP32 neighbours of each midpoint.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_qrl.formats.compiling import as_bytes, is_number
from lightning_qrl.formats.rounding import up_or_down_

FP32_MANTISSA_BITS = 23
FP32_EXPONENT_BIAS = 127
FP32_EXPONENT_MASK = 0x7F800000


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A signed float of at most 8 bits.

    Args:
        exponent_bits: E, 1 to 7.
        mantissa_bits: M, 0 to 6.
    """

    exponent_bits: int
    mantissa_bits: int

    @property
    def bits(self) -> int:
        """Stored bits: 1 + E + M."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal value."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def emax(self) -> int:
        """The exponent of the largest value."""
        reserved = 1 if (self.exponent_bits, self.mantissa_bits) == (5, 2) else 0
        return (1 << self.exponent_bits) - 2 - reserved + self.emin

    @property
    def largest(self) -> float:
        """The largest finite value."""
        reserved = 1 if (self.exponent_bits, self.mantissa_bits) == (4, 3) else 0
        return (2 - (1 + reserved) * 2.0**-self.mantissa_bits) * 2.0**self.emax

    @property
    def smallest(self) -> float:
        """The smallest value above zero."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def has_nan(self) -> bool:
        """Whether a code says NaN."""
        return (self.exponent_bits, self.mantissa_bits) in {(4, 3), (5, 2)}

    def round_(
        self, values: Tensor, scratch: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Round to representable values, saturating; NaN stays NaN.

        Args:
            values: FP32, any shape. Overwritten.
            scratch: FP32 of the same shape and strides, overwritten too; saves an allocation, which
                costs more than a pass over a large tensor.
            noise: uniform in [0, 1), of the same shape, for stochastic rounding; None rounds to the
                nearest, ties to even.

        Returns:
            The rounded values, often `values` itself.
        """
        values = values.clamp_(-self.largest, self.largest)
        binade = _binade(values, self.emin, scratch)
        if noise is None:
            # alpha * binade is exact, so a fused multiply-add gives the same sum.
            alpha = 1.5 * 2.0 ** (FP32_MANTISSA_BITS - self.mantissa_bits)
            return values.add_(binade, alpha=alpha).sub_(binade, alpha=alpha)
        gap = binade.mul_(2.0**-self.mantissa_bits)
        return up_or_down_(values.div_(gap), noise).mul_(gap)

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
        magnitudes = elements.abs()
        if not self.has_nan:
            magnitudes = torch.where(is_number(magnitudes), magnitudes, 0.0)
        # The FP32 bits of a normal hold its code. Those of a subnormal plus 2^emin do, one exponent
        # too high; for a normal that is the smaller number. So both need no telling apart.
        raised = (magnitudes + 2.0**self.emin).view(torch.int32) - (1 << FP32_MANTISSA_BITS)
        bits = torch.maximum(magnitudes.view(torch.int32), raised)
        codes = bits.bitwise_right_shift_(FP32_MANTISSA_BITS - self.mantissa_bits).sub_(
            self._exponent_offset
        )
        sign = (sign_of.view(torch.int32) >> (32 - self.bits)).bitwise_and_(self._sign_bit)
        return as_bytes(codes.clamp_max_(self._sign_bit - 1).bitwise_or_(sign))

    def decode(self, codes: Tensor) -> Tensor:
        """The value of each code; both zeros give +0, codes above the largest give NaN.

        Args:
            codes: uint8, any shape.

        Returns:
            FP32, the same shape.
        """
        codes = codes.int()
        bits = (codes & (self._sign_bit - 1)) + self._exponent_offset
        values = (bits << (FP32_MANTISSA_BITS - self.mantissa_bits)).view(torch.float32)
        # Right for a normal; 2 * values - 2^emin is right for a subnormal, and the smaller there.
        values = torch.minimum(values, 2 * values - 2.0**self.emin)
        if self.has_nan:
            values = torch.where(values <= self.largest, values, math.nan)
        return torch.where(codes > self._sign_bit, -values, values)

    @property
    def _sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _exponent_offset(self) -> int:
        """What the FP32 exponent field of a value exceeds its own by, above the mantissa bits."""
        return (self.emin + FP32_EXPONENT_BIAS - 1) << self.mantissa_bits


def _binade(values: Tensor, emin: int, scratch: Tensor | None) -> Tensor:
    """2^e of each value, e its exponent but at least emin; written over `scratch`."""
    floor = (emin + FP32_EXPONENT_BIAS) << FP32_MANTISSA_BITS
    bits = values.view(torch.int32)
    if torch.compiler.is_compiling():  # which fuses the passes, and knows no `out=` into a view
        return (bits & FP32_EXPONENT_MASK).clamp_min(floor).view(torch.float32)
    binade = torch.empty_like(values) if scratch is None else scratch
    torch.bitwise_and(bits, FP32_EXPONENT_MASK, out=binade.view(torch.int32)).clamp_min_(floor)
    return binade


@functools.cache
def _magnitudes(element: SmallFloat) -> tuple[float, ...]:
    """The non-negative finite values in the order of their codes."""
    steps = 2**element.mantissa_bits
    values = [m / steps * 2.0**element.emin for m in range(steps)]
    for exponent in range(element.emin, element.emax + 1):
        values += [(1 + m / steps) * 2.0**exponent for m in range(steps)]
    return tuple(v for v in values if v <= element.largest)


E2M1 = SmallFloat(exponent_bits=2, mantissa_bits=1)
E2M3 = SmallFloat(exponent_bits=2, mantissa_bits=3)
E3M2 = SmallFloat(exponent_bits=3, mantissa_bits=2)
E4M3 = SmallFloat(exponent_bits=4, mantissa_bits=3)
E5M2 = SmallFloat(exponent_bits=5, mantissa_bits=2)
