"""What a number format does to a tensor: how much is lost, and to what.

Let Q be the quantized x, e = Q - x, and ||.||^2 a sum over all elements:

    SQNR = 10 log10(||x||^2 / ||e||^2)          relative error = ||e|| / ||x||
    saturated    beyond the largest value that the scale in use can reach
    underflowed  not zero, but quantized to zero

**The decomposition.** Elements that share a scale s would fit the format's range best with the real
number s* = amax / largest; formats round it (MX to a power of two, NVFP4 to an E4M3). With Q* the
same elements rounded, to nearest even, under s*, and D the elements that Q* sends to zero (for E2M1
|x| <= amax / 24: half of the smallest step of 0.5 at amax = 6),

    e = e_scale + e_deadzone + e_grid
        e_scale    = Q - Q*                 the scale is not the ideal one
        e_deadzone = Q* - x  on D           below the smallest step
        e_grid     = Q* - x  off D          between two steps

Hence ||e||^2 is the sum of the three energies and of the three cross terms 2 <a, b>. The one of
deadzone and grid is 0, their elements being disjoint; that of scale and deadzone is 0 where Q is 0
on all of D, as for a scale that is rounded up. The one of scale and grid is negative: a scale that
is off moves every element to another grid, and away from the error that it had.

The gain of a scale is s / s*; that of the numbers is <Q, x> / ||x||^2: dequantization divides by s
what it was multiplied by, so it is nearly 1 whatever s is.

Every format has this decomposition. One without any scale has Q* = Q; one outer scale is s up to
FP32's rounding, so its e_scale is next to nothing; four-over-six counts as scale, and so does the
noise of stochastic rounding. Under a Hadamard rotation all of it is measured in the rotated basis.

Sums are in float64. Elements that are not finite, or not finite once quantized, are counted as
`skipped` and are in no sum; an infinity is in no amax.

Source: Li, Wu and Shen, "Decomposing MXFP4 quantization error for LLM RL" (arXiv 2605.20402), here
for any format, with all cross terms, the ties counted to D, and zeros not counted to D.

R rows, n columns; a block is `rows` x K of them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from lightning_qrl.formats import Format, Quantized
from lightning_qrl.formats.base import as_fp32
from lightning_qrl.formats.hadamard import rotate

PIECE = 1 << 17  # elements whose float64 intermediates exist at one time: they fit the cache
SLACK = 1 + 2.0**-20  # an FP32 outer scale may be rounded to just below amax / largest


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """Sums over the elements of one or more tensors; they add up by `+`.

    Attributes:
        elements: finite elements, those that the sums are over.
        skipped: elements that are not finite, before or after.
        signal: ||x||^2.
        error: ||e||^2.
        product: <Q, x>.
        saturated: elements beyond the reach of their scale.
        underflowed: elements that are not zero but quantized to zero.
        in_deadzone: elements that are not zero but in D.
        scale: ||e_scale||^2.
        deadzone: ||e_deadzone||^2.
        grid: ||e_grid||^2.
        scale_deadzone: 2 <e_scale, e_deadzone>.
        scale_grid: 2 <e_scale, e_grid>.
        deadzone_grid: 2 <e_deadzone, e_grid>.
        scale_gain: sum of s / s* over the scales.
        scales: scales in that sum; those of blocks of zeros are not.
    """

    elements: float = 0
    skipped: float = 0
    signal: float = 0
    error: float = 0
    product: float = 0
    saturated: float = 0
    underflowed: float = 0
    in_deadzone: float = 0
    scale: float = 0
    deadzone: float = 0
    grid: float = 0
    scale_deadzone: float = 0
    scale_grid: float = 0
    deadzone_grid: float = 0
    scale_gain: float = 0
    scales: float = 0

    def __add__(self, other: "QuantizationError") -> "QuantizationError":
        names = [field.name for field in fields(self)]
        return QuantizationError(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def relative_mse(self) -> float:
        """||e||^2 / ||x||^2; 0 for zeros."""
        return _ratio(self.error, self.signal)

    @property
    def relative_error(self) -> float:
        """||e|| / ||x||; 0 for zeros."""
        return math.sqrt(self.relative_mse)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise, in dB; infinite where nothing is lost."""
        return -10 * math.log10(self.relative_mse) if self.relative_mse else math.inf

    @property
    def shares(self) -> dict[str, float]:
        """Each energy and cross term as a share of ||e||^2; together 1, or 0 without error."""
        names = ("scale", "deadzone", "grid", "scale_deadzone", "scale_grid", "deadzone_grid")
        return {name: _ratio(getattr(self, name), self.error) for name in names}

    @property
    def scale_grid_cosine(self) -> float:
        """The cosine between e_scale and e_grid."""
        return _ratio(self.scale_grid / 2, math.sqrt(self.scale * self.grid))

    @property
    def mean_scale_gain(self) -> float:
        """The mean of s / s*; 1 where there are no scales."""
        return self.scale_gain / self.scales if self.scales else 1.0

    @property
    def gain(self) -> float:
        """<Q, x> / ||x||^2: the factor on x that comes nearest to Q; 1 for zeros."""
        return self.product / self.signal if self.signal else 1.0

    def fraction(self, name: str) -> float:
        """A count, such as ``saturated``, as a fraction of the elements."""
        return _ratio(getattr(self, name), self.elements)


def quantization_error(
    x: Tensor, format: Format, generator: torch.Generator | None = None
) -> QuantizationError:
    """Measure what a format does to a tensor.

    Args:
        x: floating point [..., n], at least one axis.
        format: what to quantize it to.
        generator: of the noise of stochastic rounding.
    """
    quantized = format.quantize(x, generator)
    basis = rotate(as_fp32(x), quantized.layout.rotation)
    if not basis.numel():
        return QuantizationError()
    table = _Table(format.codes().to(x.device))
    return pool(_measure(piece, table) for piece in _pieces(basis, quantized, table.largest))


def weight_error(weight: Tensor, format: Format) -> QuantizationError:
    """Measure what a format does to a layer's weight.

    Args:
        weight: [O, I], or [E, O, I] of experts, each of which is a tensor with scales of its own.
        format: what to quantize it to.
    """
    if weight.ndim == 2:
        return quantization_error(weight, format)
    return pool(quantization_error(expert, format) for expert in weight)


def pool(errors: Iterable[QuantizationError]) -> QuantizationError:
    """The error of several tensors taken as one."""
    return sum(errors, start=QuantizationError())


class _Table:
    """The magnitudes of a code space, float64, ascending, and rounding to them."""

    def __init__(self, codes: Tensor) -> None:
        self.magnitudes = codes[codes >= 0].double()
        self.largest = float(self.magnitudes[-1])
        middles = (self.magnitudes[1:] + self.magnitudes[:-1]) / 2
        # A tie goes to the even one of its two neighbours, the one whose index is even.
        lower_is_odd = torch.arange(len(middles), device=middles.device) % 2 == 1
        below = torch.nextafter(middles, torch.zeros_like(middles))
        self.boundaries = torch.where(lower_is_odd, below, middles)

    def round(self, values: Tensor) -> Tensor:
        """The nearest values of the code space, ties to even, saturating."""
        return self.magnitudes[torch.bucketize(values.abs(), self.boundaries)].copysign(values)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scales of some rows: [..., scale rows, scales a row], each for `spread` elements."""

    used: Tensor
    ideal: Tensor
    spread: tuple[int, int]

    def over(self, scales: Tensor, like_Rn: Tensor) -> Tensor:
        """One scale an element."""
        rows, columns = self.spread
        wide = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        return wide[: like_Rn.shape[0], : like_Rn.shape[1]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a tensor before and after, float64; without scales for a format without."""

    x_Rn: Tensor
    quantized_Rn: Tensor
    scales: _Scales | None


def _pieces(x: Tensor, quantized: Quantized, largest: float) -> Iterator[_Piece]:
    """Cut a tensor, in the basis of its elements, into pieces of whole blocks."""
    rows, n = x.shape[-2] if x.ndim > 1 else 1, x.shape[-1]
    x_BRn, values_BRn = x.view(-1, rows, n), quantized.values().view(-1, rows, n)
    outer = quantized.outer_scale
    if outer is not None:
        values_BRn = values_BRn * outer.expand(*x.shape[:-1], 1).reshape(-1, rows, 1)
    scales = _scales(x_BRn, quantized, largest)
    share = scales.spread[0] if scales else 1
    step = max(1, PIECE // n // share) * share
    for b in range(len(x_BRn)):
        for first in range(0, rows, step):
            part, own = slice(first, first + step), None
            if scales:
                blocks = slice(first // share, (first + step) // share)
                own = _Scales(scales.used[b, blocks], scales.ideal[b, blocks], scales.spread)
            yield _Piece(x_BRn[b, part].double(), values_BRn[b, part].double(), own)


def _scales(x_BRn: Tensor, quantized: Quantized, largest: float) -> _Scales | None:
    """The scale that each group of elements has, and the one that would fit it best."""
    batch, rows, n = x_BRn.shape
    magnitudes = x_BRn.nan_to_num(0.0, 0.0, 0.0).abs()
    outer, blocks = quantized.outer_scale, quantized.block_scale
    if outer is not None:
        per_row = outer.double().expand(*quantized.shape[:-1], 1).reshape(batch, rows, 1)
    if blocks is not None:
        spread = quantized.layout.block
        amax = max_pool2d(magnitudes, spread, ceil_mode=True)
        used = blocks.double().view(amax.shape)
        used = used if outer is None else used * per_row[:, :: spread[0]]
    elif outer is not None:
        spread, used = (1, n), per_row
        amax = (
            magnitudes.amax(-1, keepdim=True)
            if outer.ndim
            else magnitudes.amax().expand(batch, rows, 1)
        )
    else:
        return None
    return _Scales(used, amax.double() / largest, spread)


def _measure(piece: _Piece, table: _Table) -> QuantizationError:
    x, q, scales = piece.x_Rn, piece.quantized_Rn, piece.scales
    finite = x.isfinite() & q.isfinite()
    x, q = x.where(finite, 0), q.where(finite, 0)
    best, saturated, gains = q, x.abs() > table.largest * SLACK, x.new_zeros(0)
    if scales is not None:
        ideal = scales.over(scales.ideal, x)
        best = ideal * table.round(torch.where(ideal > 0, x / ideal, 0))
        saturated = x.abs() > table.largest * SLACK * scales.over(scales.used, x)
        known = (scales.ideal > 0) & scales.used.isfinite()
        gains = scales.used[known] / scales.ideal[known]
    dead = (best == 0) & finite
    in_scale, rest = q - best, best - x
    in_deadzone, in_grid = rest.where(dead, 0), rest.where(~dead, 0)
    return QuantizationError(
        elements=float(finite.sum()),
        skipped=float((~finite).sum()),
        signal=_dot(x, x),
        error=_dot(q - x, q - x),
        product=_dot(q, x),
        saturated=float((saturated & finite & (q != 0)).sum()),
        underflowed=float(((q == 0) & (x != 0)).sum()),
        in_deadzone=float((dead & (x != 0)).sum()),
        scale=_dot(in_scale, in_scale),
        deadzone=_dot(in_deadzone, in_deadzone),
        grid=_dot(in_grid, in_grid),
        scale_deadzone=2 * _dot(in_scale, in_deadzone),
        scale_grid=2 * _dot(in_scale, in_grid),
        deadzone_grid=2 * _dot(in_deadzone, in_grid),
        scale_gain=float(gains.sum()),
        scales=len(gains),
    )


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
