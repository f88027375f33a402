"""A small quantized linear layer, and its equations evaluated in float64.

The oracle takes its operands from `Format.quantize(...).dequantize()`, the stored codes, while the
layer computes with `Format.scaled`: the layer must use the very numbers that would be stored.

N tokens, I in features, O out features, K the axis that a GEMM sums over.
"""

import pytest
import torch
from torch import nn

from lightning_qrl.formats import format_names, get_format
from lightning_qrl.precision import LinearPrecision, QuantLinear
from lightning_qrl.precision.sides import SideSwitch

N, I, O = 7, 40, 24  # noqa: E741 - none a multiple of 16
HALF_ULP_FP32 = 2.0**-24
HALF_ULP_BF16 = 2.0**-8
BACKWARDS = ["high_precision", "dequantized", "quantized"]

NVFP4_ROW = get_format("nvfp4", outer_scale="row", four_over_six="mae")
NVFP4_TENSOR = get_format("nvfp4")
FP8_ROW = get_format("fp8_e4m3", outer_scale="row")
FP8_BLOCK = get_format("fp8_e4m3", block=(1, 128), outer_scale="none")
FP8_SQUARE = get_format("fp8_e4m3", block=(128, 128), outer_scale="none")
INT4_GROUPS = get_format("int4", block=(1, 16), outer_scale="none")
PAIRS = [
    *((get_format(name), get_format(name)) for name in format_names()),
    (NVFP4_ROW, NVFP4_ROW),
    (NVFP4_TENSOR, NVFP4_ROW),
    (NVFP4_ROW, NVFP4_TENSOR),
    (FP8_ROW, FP8_ROW),
    (get_format("fp8_e4m3", outer_scale="none"), NVFP4_ROW),
    (get_format("nvfp4", block=(16, 16)), NVFP4_TENSOR),
    (FP8_SQUARE, FP8_BLOCK),
    (INT4_GROUPS, INT4_GROUPS),
    (INT4_GROUPS, get_format("bf16")),
    (INT4_GROUPS, None),
    (NVFP4_ROW, None),
    (None, FP8_ROW),
]
each_pair = pytest.mark.parametrize(("weight", "activation"), PAIRS, ids=str)
each_backward = pytest.mark.parametrize("backward", BACKWARDS)


def make_layer(weight, activation, backward="high_precision", gradient=None, bias=False):
    """A layer whose rows of weights are of different size: their outer scales differ."""
    torch.manual_seed(0)
    linear = nn.Linear(I, O, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-2, 1, O)[:, None])
    precision = LinearPrecision(weight, activation, gradient, backward)
    return QuantLinear.from_linear(linear, precision, precision, SideSwitch())


def make_inputs(*shape):
    """X and dY; tokens are of different size."""
    torch.manual_seed(1)
    tokens = shape or (N,)
    x = torch.randn(*tokens, I) * torch.logspace(-2, 2, max(tokens[0], 1))[: tokens[0]].view(
        -1, *[1] * len(tokens)
    )
    return x, torch.randn(*tokens, O)


def run(layer, x, dy):
    """Output, dX and dW of one pass."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def stored(format, values):
    """DQ(Q(values)) in float64."""
    return (values if format is None else format.quantize(values).dequantize()).double()


def rounding_bound(a_MK, b_NK, half_ulp=HALF_ULP_FP32):
    """How far A B^T may be off after FP32 rounding of each product and sum and of the scales."""
    return (a_MK.shape[1] + 8) * half_ulp * (a_MK.abs() @ b_NK.abs().T)


def assert_product(actual, a_MK, b_NK):
    """The FP32 tensor is A B^T, to FP32 rounding."""
    assert actual.dtype == torch.float32
    error = (actual.double() - a_MK @ b_NK.T).abs()
    assert (error <= rounding_bound(a_MK, b_NK)).all(), f"off by {error.max()}"


def is_product(actual, a_MK, b_NK):
    """Whether it is."""
    error = (actual.double() - a_MK @ b_NK.T).abs()
    return bool((error <= rounding_bound(a_MK, b_NK)).all())
