"""BF16: the first 16 bits of an FP32, rounded to nearest even; no scales.

The format of a layer that is kept out of quantization, and the control of every comparison. It is
PyTorch's own cast, infinities included: a magnitude above 3.39e38 rounds to infinity.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.base import Format, Quantized, Scaled, as_fp32


class _BF16Codes:
    """16-bit codes, stored in an int16 since PyTorch computes little in uint16."""

    def decode(self, codes: Tensor) -> Tensor:
        """The FP32 value of each int16 code."""
        return codes.view(torch.bfloat16).float()


@dataclass(frozen=True, slots=True)
class BF16(Format):
    """BF16, by PyTorch's cast."""

    name: ClassVar[str] = "bf16"
    bits: ClassVar[float] = 16.0

    @override
    def scaled(self, x: Tensor) -> Scaled:
        return Scaled(as_fp32(x).to(torch.bfloat16).float(), None)

    @override
    def quantize(self, x: Tensor) -> Quantized:
        codes = as_fp32(x).to(torch.bfloat16).view(torch.int16)
        return Quantized(codes, None, None, _BF16Codes())

    @override
    def codes(self) -> Tensor:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
        finite = every[every.isfinite()].sort().values
        return finite[torch.cat([finite[1:] != finite[:-1], torch.ones(1, dtype=torch.bool)])]
