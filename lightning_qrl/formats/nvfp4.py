"""NVFP4: blocks of 16 E2M1 values with an E4M3 scale each, and one FP32 scale a tensor or a row.

    outer    = amax / (6 * bound)                                 bound = 448
    scale_b  = E4M3(min(amax_b / 6 * (6 * bound / amax), 448))
    element  = E2M1(clamp(x / (scale_b * outer), +-6))
    x        ~ element * scale_b * outer

`outer_scale="row"` takes amax over each row of the last axis: a token's numbers then depend on no
other token. With "none", scale_b is E4M3(amax_b / 6) and there is nothing outside. A block of
16 x 16 has one scale, so that a weight and its transpose have the same codes (NVIDIA, arXiv
2509.25149).

`four_over_six` tries each block twice, its amax mapped to 6 and to 4 (scale 1.5 times as large):
the step of E2M1 is widest between 4 and 6, so a block crowded near its amax does better at 4. The
smaller error in x's own units wins, mean absolute ("mae") or mean squared ("mse"); a tie takes 6.
The bound is then 256, so that 1.5 times the largest scale still fits into E4M3.

Source: Transformer Engine 2.20, its PyTorch reference quantizer, and "The 4-bitter Lesson" for
four-over-six. The reciprocals are capped at the largest FP32, as there.

Deviations: torchao keeps block scales at or above 2^-6, modelopt at or above 2^-9: `scale_floor`.
Without it, as in Transformer Engine, a block far below the tensor's amax has scale 0 and comes out
as zeros. A tensor of zeros (or of nothing finite) has outer scale 0. Under four-over-six a block
with an infinity takes 6, both of its errors being infinite, as does one whose squared errors are
beyond FP32 (|x| below 1e-22 or above 1e19).

R rows, B blocks a row, K = 16 values a block of one row.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.blocks import (
    BlockFormat,
    block_amax,
    block_sum,
    magnitudes,
    one_zero,
    outer_amax,
)
from lightning_qrl.formats.compiling import apart, is_number
from lightning_qrl.formats.low_bit import Split
from lightning_qrl.formats.quantized import Block, Codec
from lightning_qrl.formats.small_float import E2M1, E4M3, SmallFloat

LARGEST_FP32 = torch.finfo(torch.float32).max
BOUND = 448.0
BOUND_FOUR_OVER_SIX = 256.0


@dataclass(frozen=True, slots=True)
class NVFP4(BlockFormat):
    """NVFP4.

    Args:
        outer_scale: one FP32 scale a tensor, one a row, or none.
        block: [1, 16], or [16, 16] for two-dimensional blocks.
        four_over_six: map a block's amax to 6 always ("none"), or to 6 or 4, whichever has the
            smaller mean absolute ("mae") or mean squared ("mse") error.
        scale_floor: block scales are at least this, in units of E4M3; 0 to 448.
    """

    outer_scale: Literal["tensor", "row", "none"] = "tensor"
    block: Block = (1, 16)
    four_over_six: Literal["none", "mae", "mse"] = "none"
    scale_floor: float = 0.0

    name: ClassVar[str] = "nvfp4"
    element: ClassVar[SmallFloat] = E2M1
    scale_codec: ClassVar[Codec | None] = E4M3
    blocks: ClassVar[tuple[Block, ...]] = ((1, 16), (16, 16))

    @override
    def __post_init__(self) -> None:
        super(NVFP4, self).__post_init__()
        if self.block[0] > 1 and self.outer_scale == "row":
            raise ValueError("nvfp4: block=[16, 16] spans rows, so it excludes outer_scale=row")
        if self.four_over_six != "none" and self.rounding == "stochastic":
            raise ValueError(
                "nvfp4: four_over_six compares nearest roundings; set rounding=nearest"
            )
        number = type(self.scale_floor) in (int, float)
        if not (number and 0 <= self.scale_floor <= E4M3.largest):
            raise ValueError(f"nvfp4: scale_floor={self.scale_floor!r} is not 0 to 448")

    @property
    @override
    def bits(self) -> float:
        return 4 + 8 / math.prod(self.block)

    @override
    def split(self, x_RBK: Tensor, noise_RBK: Tensor | None) -> Split:
        scratch_RBK = magnitudes(x_RBK)
        row_amax_RB = block_amax(scratch_RBK)
        outer, encode = self._outer(row_amax_RB)
        ideal_RB = self.share(torch.amax, row_amax_RB) / E2M1.largest * encode
        if self.four_over_six == "none":
            scale_RB = self._scale(ideal_RB)
            values_RBK = _round(x_RBK, scale_RB, outer, scratch_RBK, noise_RBK)
            return Split(values_RBK, scale_RB, outer)
        return Split(*self._four_over_six(x_RBK, ideal_RB, outer, scratch_RBK), outer)

    def _outer(self, row_amax_RB: Tensor) -> tuple[Tensor | None, Tensor | float]:
        """The outer scale, and what the ideal block scales are multiplied by for it."""
        if self.outer_scale == "none":
            return None, 1.0
        numbers_RB = torch.where(is_number(row_amax_RB), row_amax_RB, 0.0)  # NaN is its block's
        amax = outer_amax(numbers_RB, self.outer_scale)
        largest = E2M1.largest * (BOUND if self.four_over_six == "none" else BOUND_FOUR_OVER_SIX)
        return amax / largest, (largest / amax).clamp_max(LARGEST_FP32)

    def _scale(self, ideal_RB: Tensor) -> Tensor:
        if self.scale_floor:
            ideal_RB = ideal_RB.clamp_min(self.scale_floor)
        return apart(E4M3.round_(ideal_RB.clone()))

    def _four_over_six(
        self, x_RBK: Tensor, ideal_RB: Tensor, outer: Tensor | None, scratch_RBK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Round with both scales and keep the better of each block: values and block scales."""
        scale4_RB, scale6_RB = self._scale(ideal_RB * 1.5), self._scale(ideal_RB)
        values4_RBK = _round(x_RBK, scale4_RB, outer, scratch_RBK)
        error4_RB = self._error(values4_RBK, x_RBK, outer)
        values6_RBK = _round(x_RBK, scale6_RB, outer, scratch_RBK)
        error6_RB = self._error(values6_RBK, x_RBK, outer)
        take4_RB = apart((error4_RB < error6_RB).float())
        take6_RB = 1 - take4_RB
        # A sum of one value and a zero: exact, and far cheaper than torch.where on a CPU.
        values_RBK = values6_RBK.mul_(take6_RB[..., None])
        values_RBK = values_RBK.addcmul_(values4_RBK, take4_RB[..., None])
        return values_RBK, scale6_RB * take6_RB + scale4_RB * take4_RB

    def _error(self, values_RBK: Tensor, x_RBK: Tensor, outer: Tensor | None) -> Tensor:
        """The summed error of each block in x's units, FP32 [R, B]."""
        units = 1.0 if outer is None else (outer[..., None] if outer.ndim else outer)
        error_RBK = (values_RBK * units).sub_(x_RBK)
        error_RBK = error_RBK.abs_() if self.four_over_six == "mae" else error_RBK.square_()
        return self.share(torch.sum, block_sum(error_RBK))


def _round(
    x_RBK: Tensor,
    scale_RB: Tensor,
    outer: Tensor | None,
    scratch_RBK: Tensor,
    noise_RBK: Tensor | None = None,
) -> Tensor:
    """Element times block scale: x in units of both scales, to E2M1, back in units of one."""
    both_RB = scale_RB if outer is None else scale_RB * outer
    inverse_RB = apart(both_RB.reciprocal().clamp_max(LARGEST_FP32))
    elements_RBK = E2M1.round_(x_RBK * inverse_RB[..., None], scratch_RBK, noise_RBK)
    return one_zero(elements_RBK.mul_(scale_RB[..., None]))
