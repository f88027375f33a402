"""The 16-bit floats: BF16 and FP16, rounded to nearest even; no scales.

BF16 is the format of a layer that is kept out of quantization, and the control of every comparison:
the first 16 bits of an FP32. FP16 has 3 bits more of precision and a far smaller range, down to
6e-8 and up to 65504 (the precision question of arXiv 2510.26788). Both are PyTorch's own casts:
infinity stays, and what is beyond the largest value becomes infinity.

FP16 values have 11 significant bits, so their GEMMs run in FP32 whatever the input's dtype is.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.formats.base import Format, Operand, as_fp32
from lightning_qrl.formats.quantized import Layout, Quantized
from lightning_qrl.formats.scaled import Scaled


@dataclass(frozen=True, slots=True)
class _Cast:
    """16-bit codes, stored in an int16 since PyTorch computes little in uint16."""

    dtype: torch.dtype
    bits: ClassVar[int] = 16

    def encode(self, elements: Tensor, sign_of: Tensor) -> Tensor:
        """The code of each element; it has its own sign."""
        return elements.to(self.dtype).view(torch.int16)

    def decode(self, codes: Tensor) -> Tensor:
        """The FP32 value of each int16 code."""
        return codes.view(self.dtype).float()


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    """A tensor in the dtype of its format."""

    cast: Tensor

    def scaled(self) -> Scaled:
        return Scaled(self.cast.float(), None)

    def quantized(self) -> Quantized:
        layout = Layout(_Cast(self.cast.dtype))
        return Quantized(self.cast.view(torch.int16), None, None, layout, self.cast.shape)


@dataclass(frozen=True, slots=True)
class _Half(Format):
    """What the two share. A subclass names itself and its dtype."""

    bits: ClassVar[float] = 16.0
    elementwise: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype]

    @override
    def operand(self, x: Tensor, generator: torch.Generator | None = None) -> Operand:
        return _Operand(as_fp32(x).to(self.dtype))

    @override
    def codes(self) -> Tensor:
        every = _Cast(self.dtype).decode(torch.arange(-(2**15), 2**15, dtype=torch.int16))
        finite: Tensor = torch.unique(every[every.isfinite()])  # ascending, and -0 equals 0
        return finite


@dataclass(frozen=True, slots=True)
class BF16(_Half):
    """BF16, by PyTorch's cast."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, slots=True)
class FP16(_Half):
    """FP16, by PyTorch's cast."""

    name: ClassVar[str] = "fp16"
    wide: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.float16
