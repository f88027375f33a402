"""NVFP4: blocks of 16 E2M1 values with an E4M3 scale each, and one FP32 scale a tensor or a row.

    outer    = amax / (6 * bound)                                 bound = 448
    scale_b  = E4M3(min(amax_b / 6 * (6 * bound / amax), 448))
    element  = E2M1(clamp(x / (scale_b * outer), +-6))
    x        ~ element * scale_b * outer

`outer_scale="row"` takes amax over each row of the last axis: a token's numbers then depend on no
other token. `four_over_six` tries each block twice, its amax mapped to 6 and to 4 (scale 1.5 times
as large): the step of E2M1 is widest between 4 and 6, so a block crowded near its amax does better
at 4. The smaller error in x's own units wins, mean absolute ("mae") or mean squared ("mse"); a tie
takes 6. The bound is then 256, so that 1.5 times the largest scale still fits into E4M3.

Source: Transformer Engine 2.20, its PyTorch reference quantizer, and "The 4-bitter Lesson" for
four-over-six. The reciprocals are capped at the largest FP32, as there.

Deviations: torchao keeps block scales at or above 2^-6, modelopt at or above 2^-9; here, as in
Transformer Engine, a block far below the tensor's amax has scale 0 and comes out as zeros. A tensor
of zeros (or of nothing finite) has outer scale 0.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.base import finite_magnitudes, outer_amax
from lightning_qrl.formats.blocks import BlockFormat, block_amax, fold
from lightning_qrl.formats.small_float import E2M1, E4M3, SmallFloat

LARGEST_FP32 = torch.finfo(torch.float32).max
BOUND = 448.0
BOUND_FOUR_OVER_SIX = 256.0


@dataclass(frozen=True, slots=True)
class NVFP4(BlockFormat):
    """NVFP4 with 1x16 blocks.

    Args:
        outer_scale: one FP32 scale a tensor, or one a row.
        four_over_six: map a block's amax to 6 always ("none"), or to 6 or 4, whichever has the
            smaller mean absolute ("mae") or mean squared ("mse") error.
    """

    outer_scale: Literal["tensor", "row"] = "tensor"
    four_over_six: Literal["none", "mae", "mse"] = "none"

    name: ClassVar[str] = "nvfp4"
    bits: ClassVar[float] = 4.0 + 8.0 / 16
    element: ClassVar[SmallFloat] = E2M1
    block: ClassVar[int] = 16

    @override
    def quantize_blocks(self, x_bK: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        scratch_bK = finite_magnitudes(x_bK, nan=math.nan)
        amax_b1 = block_amax(scratch_bK)
        amax = outer_amax(amax_b1.squeeze(-1), self.outer_scale)
        largest = E2M1.largest * (BOUND if self.four_over_six == "none" else BOUND_FOUR_OVER_SIX)
        outer = amax / largest
        encode = (largest / amax).clamp_max_(LARGEST_FP32)
        ideal_b1 = (amax_b1 / E2M1.largest).mul_(encode[..., None])
        if self.four_over_six == "none":
            scale_b1 = E4M3.round_(ideal_b1)
            return _round(x_bK, scale_b1, outer, scratch_bK), scale_b1, outer
        return *self._four_over_six(x_bK, ideal_b1, outer, scratch_bK), outer

    def _four_over_six(
        self, x_bK: Tensor, ideal_b1: Tensor, outer: Tensor, scratch_bK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Round with both scales and keep the better of each block: values and block scales."""
        scale4_b1 = E4M3.round_(ideal_b1 * 1.5)
        values4_bK = _round(x_bK, scale4_b1, outer, scratch_bK)
        error4_b1 = self._error(values4_bK, x_bK, outer, scratch_bK)
        scale6_b1 = E4M3.round_(ideal_b1)
        values6_bK = _round(x_bK, scale6_b1, outer, scratch_bK)
        error6_b1 = self._error(values6_bK, x_bK, outer, scratch_bK)
        take4_b1 = (error4_b1 < error6_b1).float()
        # A sum of one value and a zero: exact, and far cheaper than torch.where on a CPU.
        values_bK = values6_bK.mul_(1 - take4_b1).addcmul_(values4_bK, take4_b1)
        return values_bK, scale6_b1.mul_(1 - take4_b1).addcmul_(scale4_b1, take4_b1)

    def _error(self, values_bK: Tensor, x_bK: Tensor, outer: Tensor, scratch_bK: Tensor) -> Tensor:
        """The summed error of each block in x's units, FP32 [..., blocks, 1]."""
        error_bK = torch.mul(values_bK, outer[..., None], out=scratch_bK).sub_(x_bK)
        error_bK = error_bK.abs_() if self.four_over_six == "mae" else error_bK.square_()
        return fold(torch.add, error_bK)


def _round(x_bK: Tensor, scale_b1: Tensor, outer: Tensor, scratch_bK: Tensor) -> Tensor:
    """Element times block scale: x in units of both scales, to E2M1, back in units of one."""
    inverse_b1 = (scale_b1 * outer[..., None]).reciprocal_().clamp_max_(LARGEST_FP32)
    return E2M1.round_(x_bK * inverse_b1, scratch_bK).mul_(scale_b1)
