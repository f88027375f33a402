"""The quantized linear layer in BF16 and FP16, and under autocast: what is rounded, and when.

N tokens, I in features, O out features.
"""

import pytest
import torch
from linear_oracle import (
    FP8_BLOCK,
    FP8_SQUARE,
    HALF_ULP_BF16,
    INT4_GROUPS,
    NVFP4_ROW,
    NVFP4_TENSOR,
    I,
    O,
    each_backward,
    each_pair,
    make_inputs,
    make_layer,
    rounding_bound,
    run,
    stored,
)
from torch import nn

from lightning_qrl.formats import get_format

FP16 = get_format("fp16")


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@each_pair
@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_rounds_the_result_but_not_the_scales(weight, activation, autocast, device):
    layer = make_layer(weight, activation, "dequantized").to(device)
    x, dy = (t.to(device) for t in make_inputs())
    x = x.bfloat16()
    x_in = x.float() if autocast else x
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        y, dx, dw = run(layer, x_in, dy.bfloat16())
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, x_in.dtype, torch.float32)
    # What has more bits than BF16 (a weight that is not quantized, an integer times its group's
    # scale) is rounded to it; the rest is exact in it, or is multiplied in FP32.
    a, b = stored(activation, x), stored(weight, layer.weight)
    if weight in (None, INT4_GROUPS):
        b = b.bfloat16().double()
    if activation == INT4_GROUPS:
        a = a.bfloat16().double()
    expected = a @ b.T
    error = (y.double() - expected).abs()
    # rounded once by the GEMM, once when the scales are applied
    assert (error <= 2.05 * HALF_ULP_BF16 * expected.abs() + rounding_bound(a, b)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_backward
def test_autocast_returns_the_dtypes_of_nn_linear(dtype, backward):
    layer = make_layer(NVFP4_TENSOR, NVFP4_ROW, backward, NVFP4_ROW, bias=True)
    plain = nn.Linear(I, O)
    plain.load_state_dict(layer.state_dict())
    x, dy = make_inputs()
    results = []
    for module in (layer, plain):
        with torch.autocast("cpu", dtype):  # the backward too, which must not mind
            results.append(run(module, x, dy.to(dtype)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.isfinite().all()
        # 4 bits: alike, not equal. In FP16 a product of E4M3 scales overflows where theirs does not
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert 0 < difference < 0.3 or backward == "high_precision"


@pytest.mark.parametrize("backward", ["high_precision", "quantized"])
def test_quantized_weight_is_that_of_the_master_weight_under_autocast(backward):
    layer = make_layer(NVFP4_TENSOR, NVFP4_ROW, backward, None)
    x, dy = make_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        _, dx, _ = run(layer, x, dy.bfloat16())
    w_OI = layer.weight.bfloat16().double()
    if backward == "quantized":
        w_OI = stored(NVFP4_TENSOR, layer.weight.T).T  # not of its BF16 rounding
    dy_NO = dy.bfloat16().double()
    error = (dx.double() - dy_NO @ w_OI).abs()
    bound = rounding_bound(dy_NO, w_OI.T)
    # dX in BF16 twice (GEMM, scales), then cast back to FP32
    assert (error <= 2.05 * HALF_ULP_BF16 * (dy_NO @ w_OI).abs() + bound).all()


@each_backward
@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        (FP16, FP16),
        (FP16, NVFP4_ROW),
        (NVFP4_ROW, FP16),
        (FP16, None),
        (FP8_SQUARE, FP8_BLOCK),
    ],
    ids=str,
)
def test_formats_of_more_bits_than_bf16_have_their_gemms_in_fp32(weight, activation, backward):
    layer = make_layer(weight, activation, backward)
    x, dy = make_inputs()
    dy = dy.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, dw = run(layer, x, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    a, b, dy = stored(activation, x), stored(weight, layer.weight), dy.double()
    expected = a @ b.T
    error = (y.double() - expected).abs()
    assert (error <= HALF_ULP_BF16 * expected.abs() + 1.01 * rounding_bound(a, b)).all()
    if backward == "dequantized":
        assert ((dx.double() - dy @ b).abs() <= rounding_bound(dy, b.T)).all()
        assert ((dw.double() - dy.T @ a).abs() <= rounding_bound(dy.T, a.T)).all()


def test_a_gradient_of_more_bits_than_bf16_counts_where_it_is_quantized():
    x, dy = make_inputs()
    dy = dy.bfloat16()
    for backward, exact in (("quantized", True), ("dequantized", False)):
        layer = make_layer(NVFP4_TENSOR, NVFP4_ROW, backward, FP8_BLOCK)
        with torch.autocast("cpu", torch.bfloat16):
            _, _, dw = run(layer, x, dy)
        a, b = stored(FP8_BLOCK, dy.T), stored(NVFP4_ROW, x.T)
        if not exact:
            a, b = dy.T.double(), stored(NVFP4_ROW, x).T
        error = (dw.double() - a @ b.T).abs()
        assert bool((error <= rounding_bound(a, b)).all()) is exact
