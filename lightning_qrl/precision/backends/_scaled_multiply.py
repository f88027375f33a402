"""Products of two quantized matrices on the units of a chip: torch's scaled multiply.

    FP8      torch._scaled_mm on E4M3 or E5M2 codes, FP32 accumulation, the outer scales in its
             epilogue. Rows and tensors can be mixed: a tensor's scale is repeated for its rows.
             CPUs compute it too, without units for it.
    MX       torchao.prototype.mx_formats.MXTensor on Blackwell (mxfp8, mxfp4).
    NVFP4    torchao.prototype.mx_formats.NVFP4Tensor on Blackwell; the outer scales afterwards.

cuBLAS wants rows of B and the axis that is summed in multiples of 16, or 32 with block scales: the
codes are filled up with zeros, which add nothing, after quantization, so that no scale sees them.
Not every chip has row scales with FP32 results, so there they are applied afterwards.

FP8 is tested on CPUs. MX and NVFP4: written against torch 2.13 and torchao 0.18, not run by us
(tested is, on CPUs, that torchao reads our codes and scales as the numbers we mean).

M and N rows of the operands, K the axis that is summed.
"""

import torch
from torch import Tensor
from torch.nn import functional

from lightning_qrl.formats import Operand, Quantized
from lightning_qrl.formats.small_float import SmallFloat

ALIGNMENT = 16  # of N and K in torch._scaled_mm
BLOCK_ALIGNMENT = 32  # of K with block scales
FP8_DTYPES = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}  # by exponent bits


def multiply(a_MK: Operand, b_NK: Operand, dtype: torch.dtype) -> Tensor:
    """A B^T of two quantized operands, [M, N].

    Args:
        a_MK: quantized along K.
        b_NK: quantized along K, in a format that multiplies with A's.
        dtype: of the result, BF16 or FP32.
    """
    a, b = a_MK.quantized(), b_NK.quantized()
    assert a.layout.rotation == b.layout.rotation
    if 0 in (*a.packed.shape, *b.packed.shape):
        return a.packed.new_zeros(len(a.packed), len(b.packed), dtype=dtype)
    if a.scale_codes is None:
        return _multiply_fp8(a, b, dtype)
    product = torch.mm(_block_tensor(a), _block_tensor(b).t())
    return _outer(product[: len(a.packed), : len(b.packed)], a, b).to(dtype)


def _multiply_fp8(a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
    """By the scaled multiply: both scales of tensors or both of rows, or else after it."""
    columns = len(b_NK.packed)
    codes_a, codes_b = _fp8(a_MK, 1), _fp8(b_NK, ALIGNMENT)
    one = torch.ones((), device=codes_a.device)
    scale_a, scale_b = (one if q.outer_scale is None else q.outer_scale for q in (a_MK, b_NK))
    if scale_a.ndim == scale_b.ndim == 0:
        return _scaled_mm(codes_a, codes_b, scale_a, scale_b, dtype)[:, :columns]
    if dtype != torch.bfloat16:
        product = _scaled_mm(codes_a, codes_b, one, one, torch.float32)[:, :columns]
        return _outer(product, a_MK, b_NK).to(dtype)
    rows_a, rows_b = one.expand(len(codes_a), 1), one.expand(columns, 1)
    scale_b = functional.pad((scale_b * rows_b).T, (0, len(codes_b) - columns))
    return _scaled_mm(codes_a, codes_b, scale_a * rows_a, scale_b, dtype)[:, :columns]


def _scaled_mm(
    a_MK: Tensor, b_NK: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    # Without "fast accumulation", which on Hopper keeps some 14 bits of a sum.
    product: Tensor = torch._scaled_mm(
        a_MK, b_NK.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=False
    )
    return product


def _outer(product_MN: Tensor, a_MK: Quantized, b_NK: Quantized) -> Tensor:
    """The outer scales, in FP32, on the result of a GEMM."""
    if a_MK.outer_scale is not None:
        product_MN = product_MN * a_MK.outer_scale.reshape(-1, 1)
    if b_NK.outer_scale is not None:
        product_MN = product_MN * b_NK.outer_scale.reshape(1, -1)
    return product_MN


def _fp8(q_MK: Quantized, row_alignment: int) -> Tensor:
    """The codes as torch's FP8 numbers, filled up with zeros."""
    element = q_MK.layout.element
    assert isinstance(element, SmallFloat)
    codes = _filled(q_MK.packed, row_alignment, ALIGNMENT)
    return codes.view(FP8_DTYPES[element.exponent_bits])


def _block_tensor(q_MK: Quantized) -> Tensor:
    """Codes and block scales of MXFP8, MXFP4 or NVFP4 as torchao's tensor, filled up with zeros.

    Its products are FP32 (with MX, rounded to BF16). On a CPU, torchao dequantizes it first.
    """
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        NVFP4Tensor,
        QuantizeTensorToNVFP4Kwargs,
    )
    from torchao.quantization.quantize_.common import KernelPreference

    native = q_MK.packed.device.type == "cuda"
    rows, block = q_MK.layout.block
    bits = q_MK.layout.element.bits
    assert q_MK.scale_codes is not None
    scales = q_MK.scale_codes.repeat_interleave(rows, 0)[: len(q_MK.packed)]
    scales = _filled(scales, ALIGNMENT, BLOCK_ALIGNMENT // block)
    codes = _filled(q_MK.packed, ALIGNMENT, BLOCK_ALIGNMENT * bits // 8)
    if block == 16:
        quantized = QuantizeTensorToNVFP4Kwargs() if native else None
        e4m3 = scales.view(torch.float8_e4m3fn)
        nvfp4: Tensor = NVFP4Tensor(codes, e4m3, block, torch.float32, act_quant_kwargs=quantized)
        return nvfp4
    element = torch.float8_e4m3fn if bits == 8 else torch.float4_e2m1fn_x2
    kernel = KernelPreference.AUTO if native else KernelPreference.EMULATED
    e8m0, codes = scales.view(torch.float8_e8m0fnu), codes.view(element) if bits == 8 else codes
    mx: Tensor = MXTensor(codes, e8m0, element, block, torch.float32, kernel, None, False)
    return mx


def _filled(x_MK: Tensor, row_alignment: int, column_alignment: int) -> Tensor:
    """Zeros after the last row and column, up to multiples; x itself where none are needed."""
    rows, columns = -x_MK.shape[0] % row_alignment, -x_MK.shape[1] % column_alignment
    return functional.pad(x_MK, (0, columns, 0, rows)) if rows or columns else x_MK
