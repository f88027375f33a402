"""The quantized linear layer against its three equations, evaluated in float64.

The oracle takes its operands from `Format.quantize(...).dequantize()`, the stored codes, while the
layer computes with `Format.scaled`: the layer must use the very numbers that would be stored.

N tokens, I in features, O out features, K the axis that a GEMM sums over.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_qrl.formats import format_names, get_format
from lightning_qrl.formats.nvfp4 import NVFP4
from lightning_qrl.precision import LinearPrecision, QuantLinear
from lightning_qrl.precision.linear import SideSwitch

N, I, O = 7, 40, 24  # noqa: E741 - none a multiple of 16
HALF_ULP_FP32 = 2.0**-24
HALF_ULP_BF16 = 2.0**-8

NVFP4_ROW = get_format("nvfp4", outer_scale="row", four_over_six="mae")
NVFP4_TENSOR = get_format("nvfp4")
FP8_ROW = get_format("fp8_e4m3", outer_scale="row")
PAIRS = [
    *((get_format(name), get_format(name)) for name in format_names()),
    (NVFP4_ROW, NVFP4_ROW),
    (NVFP4_TENSOR, NVFP4_ROW),
    (NVFP4_ROW, NVFP4_TENSOR),
    (FP8_ROW, FP8_ROW),
    (get_format("fp8_e4m3", outer_scale="none"), NVFP4_ROW),
    (NVFP4_ROW, None),
    (None, FP8_ROW),
]
each_pair = pytest.mark.parametrize(("weight", "activation"), PAIRS, ids=str)


def make_layer(weight, activation, backward="high_precision", gradient=None, bias=False):
    torch.manual_seed(0)
    linear = nn.Linear(I, O, bias=bias)
    with torch.no_grad():  # rows of different size, or outer scales of rows would be all alike
        linear.weight.mul_(torch.logspace(-2, 1, O)[:, None])
    precision = LinearPrecision(weight, activation, gradient, backward)
    return QuantLinear.from_linear(linear, precision, precision, SideSwitch())


def make_inputs(*shape):
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
    error = (actual.double() - a_MK @ b_NK.T).abs()
    return bool((error <= rounding_bound(a_MK, b_NK)).all())


@each_pair
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
def test_forward_multiplies_the_stored_values(weight, activation, backward):
    layer = make_layer(weight, activation, backward)
    x, dy = make_inputs()
    y, _, _ = run(layer, x, dy)
    assert_product(y, stored(activation, x), stored(weight, layer.weight))
    assert not is_product(y, x.double(), layer.weight.double())


@each_pair
def test_dequantized_backward_takes_the_operands_of_the_forward(weight, activation):
    layer = make_layer(weight, activation, "dequantized")
    x, dy = make_inputs()
    _, dx, dw = run(layer, x, dy)
    dy_ON, x_IN, w_IO = dy.double().T, x.double().T, layer.weight.double().T
    assert_product(dx, dy_ON.T, stored(weight, layer.weight).T)
    assert_product(dw, dy_ON, stored(activation, x).T)
    # and they are not the original ones (TransformerEngine#3141)
    assert is_product(dx, dy_ON.T, w_IO) == (weight is None)
    assert is_product(dw, dy_ON, x_IN) == (activation is None)


@each_pair
def test_high_precision_backward_is_the_plain_gemm_bitwise(weight, activation):
    layer = make_layer(weight, activation, "high_precision")
    x, dy = make_inputs()
    _, dx, dw = run(layer, x, dy)
    assert dx.equal(dy @ layer.weight)
    assert dw.equal(dy.T @ x)


@each_pair
@pytest.mark.parametrize("gradient", [None, NVFP4_TENSOR, FP8_ROW], ids=str)
def test_quantized_backward_quantizes_along_the_summed_axis(weight, activation, gradient):
    layer = make_layer(weight, activation, "quantized", gradient)
    x, dy = make_inputs()
    _, dx, dw = run(layer, x, dy)
    assert_product(dx, stored(gradient, dy), stored(weight, layer.weight.T))
    assert_product(dw, stored(gradient, dy.T), stored(activation, x.T))


@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
def test_bias_is_added_and_gets_its_gradient(backward):
    x, dy = make_inputs()
    biased = make_layer(NVFP4_ROW, NVFP4_ROW, backward, NVFP4_ROW, bias=True)
    plain = make_layer(NVFP4_ROW, NVFP4_ROW, backward, NVFP4_ROW)
    y, dx, dw = run(biased, x, dy)
    without, dx_plain, dw_plain = run(plain, x, dy)
    assert biased.weight.equal(plain.weight)
    assert y.equal(without + biased.bias)
    assert dx.equal(dx_plain)
    assert dw.equal(dw_plain)
    assert biased.bias.grad.equal(dy.sum(0))


@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
@pytest.mark.parametrize(("frozen", "needs_input"), [(True, True), (False, False), (True, False)])
def test_gradients_go_where_they_are_wanted(backward, frozen, needs_input):
    x, dy = make_inputs()
    layer = make_layer(NVFP4_ROW, NVFP4_ROW, backward, NVFP4_ROW, bias=True)
    _, dx, dw = run(layer, x, dy)
    layer.zero_grad()
    layer.weight.requires_grad_(not frozen)
    x.requires_grad_(needs_input)
    layer(x).backward(dy)  # the bias always wants one
    assert x.grad.equal(dx) if needs_input else x.grad is None
    assert layer.weight.grad is None if frozen else layer.weight.grad.equal(dw)


@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
def test_leading_shape_does_not_matter(backward):
    layer = make_layer(NVFP4_ROW, NVFP4_ROW, backward, NVFP4_ROW, bias=True)
    x, dy = make_inputs(6)
    y, dx, dw = run(layer, x, dy)
    y3, dx3, dw3 = run(layer, x.view(2, 3, I), dy.view(2, 3, O))
    assert y3.shape == (2, 3, O)
    assert y3.equal(y.view(2, 3, O))
    assert dx3.equal(dx.view(2, 3, I))
    assert dw3.equal(dw)
    y1, dx1, _ = run(layer, x[0], dy[0])
    one, dx_one, _ = run(layer, x[:1], dy[:1])
    assert y1.shape == (O,)
    assert y1.equal(one[0])
    assert dx1.equal(dx_one[0])
    strided = x.repeat_interleave(2, dim=1)[:, ::2]
    assert not strided.is_contiguous()
    assert layer(strided).equal(y)


@each_pair
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_tokens(weight, activation, backward, shape):
    layer = make_layer(weight, activation, backward, weight, bias=True)
    x, dy = torch.zeros(*shape, I), torch.zeros(*shape, O)
    y, dx, dw = run(layer, x, dy)
    assert y.shape == dy.shape
    assert dx.shape == x.shape
    assert not dw.any()
    assert not layer.bias.grad.any()


@each_pair
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
def test_zeros_give_zeros(weight, activation, backward):
    layer = make_layer(weight, activation, backward, weight)
    with torch.no_grad():
        layer.weight[:16] = 0
    for result in run(layer, torch.zeros(N, I), torch.zeros(N, O)):
        assert not result.any()  # NaN is true


def test_a_row_scale_keeps_tokens_apart():
    layer = make_layer(NVFP4_TENSOR, NVFP4_ROW)
    x, _ = make_inputs()
    with torch.no_grad():
        y, spoilt = layer(x), layer(torch.cat([x, 1e6 * torch.ones(3, I)]))
    torch.testing.assert_close(spoilt[:N], y, rtol=1e-6, atol=0)  # sums may be ordered differently


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
    a, b = stored(activation, x), stored(weight, layer.weight)
    if weight is None:
        b = layer.weight.bfloat16().double()
    expected = a @ b.T
    error = (y.double() - expected).abs()
    # rounded once by the GEMM, once when the scales are applied
    assert (error <= 2.05 * HALF_ULP_BF16 * expected.abs() + rounding_bound(a, b)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
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


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
def test_gradient_checkpointing_changes_nothing(backward, reentrant):
    layer = make_layer(NVFP4_ROW, NVFP4_ROW, backward, NVFP4_ROW, bias=True)
    x, dy = make_inputs()
    expected = run(layer, x, dy)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = checkpoint(layer, x, use_reentrant=reentrant)
    y.backward(dy)
    for ours, theirs in zip((y, x.grad, layer.weight.grad), expected, strict=True):
        assert ours.equal(theirs)


def test_a_weight_that_changes_between_forward_and_backward_is_noticed():
    layer = make_layer(NVFP4_ROW, NVFP4_ROW, "high_precision")
    x, dy = make_inputs()
    y = layer(x.requires_grad_())
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_a_copy_has_weights_of_its_own_and_the_same_precision():
    layer = make_layer(NVFP4_ROW, NVFP4_ROW, "dequantized", bias=True)
    twin = copy.deepcopy(layer)
    x, dy = make_inputs()
    for ours, theirs in zip(run(twin, x, dy), run(layer, x, dy), strict=True):
        assert ours.equal(theirs)
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.weight.any()


def test_a_copy_samples_when_the_original_does():
    layer = make_layer(NVFP4_ROW, NVFP4_ROW)
    layer.precision["rollout"] = LinearPrecision(FP8_ROW, FP8_ROW)
    x, _ = make_inputs()
    with torch.no_grad():
        layer.switch.current = "rollout"
        y = layer(x)
        twin = copy.deepcopy(layer)  # made in the middle of sampling
        twin.weight.mul_(2)
        assert twin(x).equal(2 * y)  # not by the quantized weight of the original
        layer.switch.current = "train"
        assert not twin(x).equal(2 * y)
        assert twin(x).equal(2 * layer(x))


def test_it_stands_in_for_the_layer():
    linear = nn.Linear(I, O).eval()
    switch = SideSwitch()
    layer = QuantLinear.from_linear(linear, LinearPrecision(NVFP4_ROW), None, switch)
    assert isinstance(layer, nn.Linear)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert not layer.training
    assert list(layer.state_dict()) == list(linear.state_dict())
    x, _ = make_inputs()
    switch.current = "rollout"
    assert layer(x).equal(linear(x))  # None: the plain layer, bitwise
    switch.current = "train"
    assert not layer(x).equal(linear(x))


def test_repr_shows_what_it_computes_in():
    layer = make_layer(NVFP4_ROW, NVFP4_TENSOR, "dequantized")
    text = repr(layer)
    assert text.startswith(f"QuantLinear(in_features={I}, out_features={O}, bias=False")
    assert "dequantized" in text
    assert "outer_scale='row'" in text
    assert "outer_scale='tensor'" in text


def test_quantized_means_fewer_than_16_bits():
    bf16 = get_format("bf16")
    assert not LinearPrecision().quantized
    assert not LinearPrecision(bf16, bf16, NVFP4_ROW, "quantized").quantized
    assert LinearPrecision(weight=NVFP4_ROW).quantized
    assert LinearPrecision(bf16, FP8_ROW).quantized


# --- sampling ---------------------------------------------------------------------------------


class Counted(NVFP4):
    """NVFP4 that counts what it quantizes."""

    calls: list[tuple[int, ...]] = []

    def operand(self, x, generator=None):
        self.calls.append(tuple(x.shape))
        return NVFP4.operand(self, x, generator)


def test_while_sampling_each_weight_is_quantized_once():
    layer = make_layer(Counted(), None)
    x, _ = make_inputs()
    Counted.calls.clear()
    with torch.no_grad():
        layer.switch.current = "rollout"
        first = [layer(x) for _ in range(3)]
        assert Counted.calls == [(O, I)]
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert layer(x).equal(first[0])
        layer.switch.current = "train"
        Counted.calls.clear()
        layer(x)
        layer(x)
    assert Counted.calls == [(O, I)] * 2
