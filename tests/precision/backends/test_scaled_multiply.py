"""Native GEMMs against float64: the operands are the stored codes, the result is rounded once.

M and N rows of the operands, K the axis that is summed.
"""

import pytest
import torch

from lightning_qrl.formats import get_format
from lightning_qrl.precision.backends._scaled_multiply import multiply

HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
E4M3, E5M2 = "fp8_e4m3", "fp8_e5m2"
ROW, NONE = {"outer_scale": "row"}, {"outer_scale": "none"}
FP8_PAIRS = [
    (get_format(E4M3), get_format(E4M3)),
    (get_format(E4M3, **ROW), get_format(E4M3, **ROW)),
    (get_format(E4M3, **ROW), get_format(E4M3)),
    (get_format(E4M3), get_format(E4M3, **ROW)),
    (get_format(E4M3, **NONE), get_format(E4M3, **ROW)),
    (get_format(E4M3, **NONE), get_format(E4M3, **NONE)),
    (get_format(E5M2), get_format(E4M3)),
    (get_format(E5M2, **ROW), get_format(E4M3, **ROW)),
    (get_format(E4M3, hadamard=16), get_format(E4M3, hadamard=16)),
]
BLOCK_PAIRS = [
    (get_format("mxfp8"), get_format("mxfp8", scale_rule="rceil")),
    (get_format("mxfp4"), get_format("mxfp4")),
    (get_format("nvfp4"), get_format("nvfp4")),
    (get_format("nvfp4", **ROW, four_over_six="mae"), get_format("nvfp4", block=(16, 16))),
    (get_format("nvfp4", **NONE), get_format("nvfp4", **ROW)),
    (get_format("nvfp4", hadamard=32), get_format("nvfp4", hadamard=32)),
]
SHAPES = [(32, 24, 64), (7, 24, 40), (1, 5, 33), (17, 100, 250)]  # M, N, K
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def operands(m, n, k, device="cpu"):
    torch.manual_seed(0)
    a, b = torch.randn(m, k), torch.randn(n, k)
    return (a * torch.logspace(-2, 2, m)[:, None]).to(device), (
        b * torch.logspace(1, -1, n)[:, None]
    ).to(device)


def stored(q):
    """The stored numbers in float64, in the rotated basis; rotations cancel in a product."""
    outer = 1 if q.outer_scale is None else q.outer_scale.double()
    return q.values().double() * outer


def is_product(product, a, b, half_ulps):
    """Whether this is A B^T, to so many roundings of its dtype, FP32 sums allowed for."""
    a, b = (stored(operand.quantized()) for operand in (a, b))
    exact, sums = a @ b.T, a.abs() @ b.abs().T
    # Hopper aligns the products of a sum to some 14 bits, others add in FP32.
    adding = sums * (2.0**-13 if product.is_cuda else (a.shape[1] + 8) * 2.0**-24)
    rounding = half_ulps * HALF_ULP[product.dtype] * exact.abs()
    return bool(((product.double() - exact).abs() <= rounding + adding).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF_ULP, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("first", "second"), FP8_PAIRS, ids=str)
def test_fp8_products_are_rounded_once(first, second, shape, dtype, device):
    a, b = operands(*shape, device)
    a, b = first.operand(a), second.operand(b)
    product = multiply(a, b, dtype)
    assert product.dtype == dtype
    assert product.shape == shape[:2]
    assert is_product(product, a, b, half_ulps=1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("first", "second"), BLOCK_PAIRS, ids=str)
def test_torchao_reads_our_blocks_as_the_numbers_we_mean(first, second, shape):
    a, b = operands(*shape)
    a, b = first.operand(a), second.operand(b)
    product = multiply(a, b, torch.float32)  # on a CPU torchao dequantizes, and multiplies in FP32
    assert product.shape == shape[:2]
    assert is_product(product, a, b, half_ulps=4)


@pytest.mark.parametrize(("first", "second"), FP8_PAIRS + BLOCK_PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 16), (5, 0, 16), (5, 3, 0)])
def test_empty_operands_give_zeros(first, second, shape):
    m, n, k = shape
    a, b = first.operand(torch.ones(m, k)), second.operand(torch.ones(n, k))
    for dtype in HALF_ULP:
        product = multiply(a, b, dtype)
        assert product.dtype == dtype
        assert product.equal(torch.zeros(m, n, dtype=dtype))


@pytest.mark.parametrize("dtype", HALF_ULP, ids=str)
@pytest.mark.parametrize(("first", "second"), FP8_PAIRS[:6], ids=str)
def test_nan_stays_in_its_row_and_zeros_are_zeros(first, second, dtype):
    a, b = operands(9, 24, 40)
    a[2, 3] = torch.nan
    a[4] = 0
    product = multiply(first.operand(a), second.operand(b), dtype)
    assert product[2].isnan().all()
    assert not product[4].any()
    assert not product[torch.arange(9) != 2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchaos_own_codes_differ_from_ours_in_the_last_place_at_most(dtype):
    """What makes this backend use our codes: 448 / amax against amax / 448."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    ours = theirs = 0
    for seed in range(20):
        x = torch.randn(512, 576, generator=torch.Generator().manual_seed(seed)).to(dtype)
        x = x * (1 + seed / 7)
        scale = tensor_to_scale(x, torch.float8_e4m3fn)
        b = to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn).view(torch.uint8).int()
        a = get_format(E4M3).quantize(x).packed.int()
        assert (a - b).abs().max() <= 1
        ours, theirs = ours + a.numel(), theirs + int((a != b).sum())
    assert theirs / ours < 2e-3
