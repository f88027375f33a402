"""The quantized linear layer against its three equations, evaluated in float64.

N tokens, I in features, O out features.
"""

import pytest
import torch
from linear_oracle import (
    FP8_BLOCK,
    FP8_ROW,
    NVFP4_ROW,
    NVFP4_TENSOR,
    I,
    N,
    O,
    assert_product,
    each_backward,
    each_pair,
    is_product,
    make_inputs,
    make_layer,
    run,
    stored,
)


@each_pair
@each_backward
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
@pytest.mark.parametrize("gradient", [None, NVFP4_TENSOR, FP8_ROW, FP8_BLOCK], ids=str)
def test_quantized_backward_quantizes_along_the_summed_axis(weight, activation, gradient):
    layer = make_layer(weight, activation, "quantized", gradient)
    x, dy = make_inputs()
    _, dx, dw = run(layer, x, dy)
    assert_product(dx, stored(gradient, dy), stored(weight, layer.weight.T))
    assert_product(dw, stored(gradient, dy.T), stored(activation, x.T))


@each_backward
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


@each_backward
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


@each_backward
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
@each_backward
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
@each_backward
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
