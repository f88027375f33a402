"""Hadamard rotations, square blocks and stochastic rounding in the quantized linear layer.

N tokens, I in features, O out features, K the size of a rotation or the axis that is summed.
"""

from dataclasses import replace

import pytest
import torch
from linear_oracle import (
    NVFP4_ROW,
    NVFP4_TENSOR,
    N,
    assert_product,
    is_product,
    make_inputs,
    make_layer,
    rounding_bound,
    run,
    stored,
)

from lightning_qrl.formats import get_format
from lightning_qrl.formats.hadamard import SIGN_BITS
from lightning_qrl.formats.rounding import default_generator

STOCHASTIC = get_format("nvfp4", rounding="stochastic")
each_size = pytest.mark.parametrize("size", [16, 32])


def hadamard(size):
    """The orthogonal matrix of the rotation, float64 [K, K]: rotated = x @ matrix."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    signs = torch.tensor([1.0 - 2 * (SIGN_BITS >> i & 1) for i in range(size)]).double()
    return signs[:, None] * matrix / size**0.5


def turn(x, matrix):
    """Multiply each K neighbours by a matrix, filling up with zeros: float64."""
    x = torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % len(matrix)))
    return (x.view(*x.shape[:-1], -1, len(matrix)) @ matrix).flatten(-2)


def in_rotated_basis(format, x):
    """The stored codes in float64, as they are multiplied."""
    q = format.quantize(x)
    return q.values().double() * (1 if q.outer_scale is None else q.outer_scale.double())


def rotated_back(format, x):
    """The stored codes in float64, turned back; with what they say about the filling."""
    return turn(in_rotated_basis(format, x), hadamard(format.hadamard).T)


def assert_close(actual, expected):
    """Equal, to FP32 rounding of the largest: turning back mixes neighbours of different size."""
    assert actual.dtype == torch.float32
    assert ((actual.double() - expected).abs() <= 1e-6 * expected.abs().max()).all()


@each_size
@pytest.mark.parametrize("tokens", [64, N])
@pytest.mark.parametrize("activation", [NVFP4_TENSOR, NVFP4_ROW, get_format("mxfp8")], ids=str)
def test_hadamard_of_the_gradient_turns_both_operands_of_wgrad(size, tokens, activation):
    gradient = get_format("nvfp4", hadamard=size)
    layer = make_layer(NVFP4_ROW, activation, "quantized", gradient)
    x, dy = make_inputs(tokens)
    y, dx, dw = run(layer, x, dy)
    assert_product(y, stored(activation, x), stored(NVFP4_ROW, layer.weight))
    assert_product(dx, stored(NVFP4_TENSOR, dy), stored(NVFP4_ROW, layer.weight.T))
    turned = replace(activation, hadamard=size)
    a, b = rotated_back(gradient, dy.T), rotated_back(turned, x.T)
    bound = rounding_bound(in_rotated_basis(gradient, dy.T), in_rotated_basis(turned, x.T))
    assert ((dw.double() - a @ b.T).abs() <= bound).all()
    assert_close(stored(gradient, dy.T).float(), a[:, :tokens])
    assert_close(stored(turned, x.T).float(), b[:, :tokens])
    assert not is_product(dw, stored(NVFP4_TENSOR, dy.T), stored(activation, x.T))


@pytest.mark.parametrize("activation", [None, get_format("bf16")], ids=str)
def test_hadamard_of_the_gradient_needs_an_activation_that_can_be_turned(activation):
    layer = make_layer(NVFP4_ROW, activation, "quantized", get_format("nvfp4", hadamard=16))
    x, dy = make_inputs()
    _, _, dw = run(layer, x, dy)
    assert_product(dw, stored(NVFP4_TENSOR, dy.T), stored(activation, x.T))


@each_size
def test_rotations_of_both_operands_cancel_in_the_forward(size):
    turned = get_format("nvfp4", hadamard=size)
    layer = make_layer(turned, turned, "dequantized")
    x, dy = make_inputs()
    y, dx, dw = run(layer, x, dy)
    a, b = rotated_back(turned, x), rotated_back(turned, layer.weight)
    bound = rounding_bound(in_rotated_basis(turned, x), in_rotated_basis(turned, layer.weight))
    assert ((y.double() - a @ b.T).abs() <= bound).all()
    assert not is_product(y, stored(NVFP4_TENSOR, x), stored(NVFP4_TENSOR, layer.weight))
    # the backward sums over other axes: there they are turned back
    columns = x.shape[1]
    assert_close(dx, dy.double() @ b[:, :columns])
    assert_close(dw, dy.double().T @ a[:, :columns])


@each_size
@pytest.mark.parametrize("operand", ["weight", "activation"])
def test_a_rotation_of_one_operand_is_undone_before_it_is_multiplied(size, operand):
    turned = get_format("nvfp4", hadamard=size)
    formats = {"weight": NVFP4_TENSOR, "activation": NVFP4_TENSOR, operand: turned}
    layer = make_layer(**formats, backward="dequantized")
    x, dy = make_inputs()
    y, dx, dw = run(layer, x, dy)
    a, b = stored(formats["activation"], x), stored(formats["weight"], layer.weight)
    assert_close(y, a @ b.T)
    assert_close(dx, dy.double() @ b)
    assert_close(dw, dy.double().T @ a)
    assert not is_product(y, stored(NVFP4_TENSOR, x), stored(NVFP4_TENSOR, layer.weight))


@pytest.mark.parametrize(
    "square",
    [
        get_format("nvfp4", block=(16, 16)),
        get_format("nvfp4", block=(16, 16), four_over_six="mse"),
        get_format("mxfp4", block=(32, 32)),
    ],
    ids=str,
)
def test_dgrad_takes_the_codes_of_the_forward_where_blocks_are_square(square):
    layer = make_layer(square, NVFP4_TENSOR, "quantized", NVFP4_TENSOR)
    x, dy = make_inputs()
    y, dx, _ = run(layer, x, dy)
    w_OI = stored(square, layer.weight)
    assert stored(square, layer.weight.T).equal(w_OI.T)
    assert_product(y, stored(NVFP4_TENSOR, x), w_OI)
    assert_product(dx, stored(NVFP4_TENSOR, dy), w_OI.T)
    assert not stored(NVFP4_TENSOR, layer.weight.T).equal(stored(NVFP4_TENSOR, layer.weight).T)


def with_seed(layer, seed, x, dy):
    layer.switch.reseed(seed)
    return run(layer, x, dy)


@pytest.mark.parametrize("operand", ["weight", "activation", "gradient"])
def test_stochastic_rounding_follows_the_seed(operand):
    formats = dict.fromkeys(("weight", "activation", "gradient"), NVFP4_TENSOR)
    layer = make_layer(**{**formats, operand: STOCHASTIC}, backward="quantized")
    x, dy = make_inputs()
    globally, by_default = torch.get_rng_state(), default_generator(x.device).get_state()
    first, again, other = (with_seed(layer, seed, x, dy) for seed in (5, 5, 6))
    fourth = run(layer, x, dy)  # the noise goes on
    assert torch.get_rng_state().equal(globally)
    assert default_generator(x.device).get_state().equal(by_default)
    noisy = {"weight": (0, 1), "activation": (0, 2), "gradient": (1, 2)}[operand]  # of Y, dX, dW
    for i in range(3):
        assert again[i].equal(first[i])
        assert other[i].equal(first[i]) == (i not in noisy)
        assert fourth[i].equal(other[i]) == (i not in noisy)


def saturated(format, x):
    """What stochastic rounding is right about on average, in float64.

    The E4M3 scale of a block may round down; what is then beyond 6 of its units saturates.
    """
    q = replace(format, rounding="nearest").quantize(x)
    limit = 6 * q.block_scale.double().repeat_interleave(16, -1) * q.outer_scale.double()
    turned = x.double() if format.hadamard == "none" else turn(x, hadamard(format.hadamard))
    limit = limit[..., : turned.shape[-1]]
    return turned.clamp(-limit, limit)


def assert_mean(draws, expected, bound):
    """The mean of draws is as expected, to 5 standard errors."""
    draws = torch.stack(draws).double()
    error = (draws.mean(0) - expected).abs()
    assert (error <= 5 * draws.std(0) / len(draws) ** 0.5 + bound).all()
    assert (draws.std(0) > 0).float().mean() > 0.9


@pytest.mark.parametrize("size", ["none", 16])
def test_stochastic_rounding_of_the_gradient_is_right_on_average(size):
    gradient = replace(STOCHASTIC, hadamard=size)
    layer = make_layer(NVFP4_TENSOR, NVFP4_TENSOR, "quantized", gradient)
    x, dy = make_inputs(32)
    passes = [with_seed(layer, seed, x, dy) for seed in range(400)]
    w_IO = stored(NVFP4_TENSOR, layer.weight.T)
    dx = saturated(STOCHASTIC, dy) @ w_IO.T
    assert_mean([dx for _, dx, _ in passes], dx, rounding_bound(dy.double(), w_IO))
    a_ON = saturated(gradient, dy.T)
    b_IN = in_rotated_basis(replace(NVFP4_TENSOR, hadamard=size), x.T)
    assert_mean([dw for _, _, dw in passes], a_ON @ b_IN.T, rounding_bound(a_ON, b_IN))
    # saturation takes little: the mean is near the product with the gradient as it is
    assert (dx - dy.double() @ w_IO.T).norm() < 0.02 * dx.norm()
