"""Matrix products of quantized operands, exact and fast.

A quantized value is element code x block scale x outer scale. The first product has so few
significant bits that BF16 holds it exactly; the outer scale, one FP32 number for a tensor or a row,
is applied to the GEMM's result. A GEMM on such values with FP32 accumulation is what the hardware
computes. The GEMM runs in the dtype of its input (the autocast dtype under autocast), save that
FP16 becomes FP32 inside of the layer: the largest product of two NVFP4 values is far above 65504.

Hadamard rotations of the two operands along the axis that is summed cancel. Where only one operand
is rotated, it is rotated back first; its values then need more bits than BF16 has.

M rows of the one operand, N rows of the other, K values that are summed over.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_qrl.formats import Format, Operand, Quantized, Scaled
from lightning_qrl.formats.hadamard import Hadamard
from lightning_qrl.formats.low_bit import LowBit


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """An operand that is not quantized."""

    matrix: Tensor

    def scaled(self) -> Scaled:
        """The matrix itself."""
        return Scaled(self.matrix, None)

    def quantized(self) -> Quantized:
        """There are no codes.

        Raises:
            TypeError: always.
        """
        raise TypeError("this operand is not quantized")


def quantize(format: Format | None, matrix: Tensor, generator: torch.Generator) -> Operand:
    """A matrix as an operand, quantized along its last axis unless the format is None."""
    return Plain(matrix) if format is None else format.operand(matrix, generator)


def emulate(a_MK: Operand, b_NK: Operand, dtype: torch.dtype) -> Tensor:
    """A B^T: the GEMM on the values in `dtype`, then the outer scales: [M, N] in `dtype`."""
    a, b = a_MK.scaled(), b_NK.scaled()
    if a.rotation != b.rotation:
        a, b = a.unrotated(), b.unrotated()
    product_MN = F.linear(a.values.to(dtype), b.values.to(dtype))
    return times_outer(product_MN, rows=a.outer, columns=b.outer)


def times_outer(
    values_MN: Tensor, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """Values times the outer scales of the rows and of the columns, rounded once, at the end."""
    scaled_MN = values_MN
    # A scale of two axes makes the product FP32; one of none would itself be rounded to BF16.
    if rows is not None:
        scaled_MN = scaled_MN * rows.reshape(-1, 1)
    if columns is not None:
        scaled_MN = scaled_MN * columns.reshape(1, -1)
    return scaled_MN.to(values_MN.dtype)


def rotated(format: Format | None, size: Hadamard) -> Format | None:
    """The same format under another rotation."""
    return replace(format, hadamard=size) if isinstance(format, LowBit) else format


def common_rotation(a: Format | None, b: Format | None) -> Hadamard:
    """The rotation that `a` asks for, if both can be rotated."""
    return a.hadamard if isinstance(a, LowBit) and isinstance(b, LowBit) else "none"


def gemm_dtype(input: Tensor, *formats: Format | None) -> torch.dtype:
    """What the GEMMs of a layer run in, given its input and the formats of its operands."""
    wide = any(format is not None and format.wide for format in formats)
    dtype = output_dtype(input)
    return torch.float32 if wide or dtype == torch.float16 else dtype


def output_dtype(input: Tensor) -> torch.dtype:
    """The dtype that `nn.Linear` would return."""
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
