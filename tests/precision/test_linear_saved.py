"""What the quantized linear layer keeps for its backward, and what may happen until then.

N tokens, I in features, O out features.
"""

import pytest
import torch
from linear_oracle import (
    INT4_GROUPS,
    NVFP4_ROW,
    NVFP4_TENSOR,
    each_backward,
    each_pair,
    make_inputs,
    make_layer,
    run,
    stored,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_qrl.formats import get_format
from lightning_qrl.formats.nvfp4 import NVFP4
from lightning_qrl.precision import LinearPrecision, QuantLinear
from lightning_qrl.precision.sides import SideSwitch

N, I, O = 64, 96, 32  # noqa: E741 - whole blocks of every format


def make_whole_layer(weight, activation, backward):
    """A layer of whole blocks."""
    precision = LinearPrecision(weight, activation, NVFP4_TENSOR, backward)
    linear = nn.Linear(I, O, bias=False)
    return QuantLinear.from_linear(linear, precision, precision, SideSwitch())


def kept(layer, x):
    """The tensors that a forward keeps for the backward."""
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    node = y.grad_fn
    while node is not None:  # nothing is kept where autograd's own hooks do not see it
        others = getattr(node, "__dict__", {}).values()
        assert not [value for value in others if isinstance(value, Tensor)]
        node = node.next_functions[0][0] if node.next_functions else None
    return tensors


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


# bits a value, block scales included; FP32 outer scales a matrix and a row
SIZES = [
    (NVFP4_TENSOR, 4.5, (1, 0)),
    (NVFP4_ROW, 4.5, (0, 1)),
    (get_format("nvfp4", block=(16, 16)), 4 + 8 / 256, (1, 0)),
    (get_format("nvfp4", outer_scale="none", hadamard=16), 4.5, (0, 0)),
    (get_format("mxfp4"), 4.25, (0, 0)),
    (get_format("mxfp6_e2m3"), 6.25, (0, 0)),
    (get_format("mxfp8"), 8.25, (0, 0)),
    (get_format("fp8_e4m3"), 8, (1, 0)),
    (get_format("fp8_e4m3", outer_scale="row"), 8, (0, 1)),
    (INT4_GROUPS, 5, (0, 0)),
    (get_format("bf16"), 16, (0, 0)),
]


@pytest.mark.parametrize(("format", "bits", "outer_scales"), SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_takes_the_bytes_of_its_format(format, bits, outer_scales, dtype):
    x = torch.randn(N, I, dtype=dtype)  # wants no gradient, so W is not kept
    codes, (whole, each_row) = N * I * bits / 8, outer_scales
    dequantized = kept(make_whole_layer(NVFP4_TENSOR, format, "dequantized"), x)
    assert nbytes(dequantized) == codes + 4 * (whole + each_row * N)
    quantized = kept(make_whole_layer(NVFP4_TENSOR, format, "quantized"), x)
    assert nbytes(quantized) == codes + 4 * (whole + each_row * I)
    (original,) = kept(make_whole_layer(NVFP4_TENSOR, format, "high_precision"), x)
    assert original.data_ptr() == x.data_ptr()


def test_a_weight_is_kept_as_codes_or_is_the_parameter_itself():
    x = torch.randn(N, I, requires_grad=True)
    for backward in ("high_precision", "dequantized", "quantized"):
        layer = make_whole_layer(NVFP4_TENSOR, NVFP4_TENSOR, backward)
        layer.weight.requires_grad_(False)  # so X is not kept
        tensors = kept(layer, x)
        if backward == "dequantized":
            assert nbytes(tensors) == O * I * 4.5 / 8 + 4
        else:
            assert [tensor.data_ptr() for tensor in tensors] == [layer.weight.data_ptr()]


@each_backward
def test_nothing_is_kept_for_what_wants_no_gradient(backward):
    layer = make_whole_layer(NVFP4_TENSOR, NVFP4_TENSOR, backward)
    leaf = torch.randn(N, I, requires_grad=True)
    both = kept(layer, leaf)
    first = kept(layer, leaf.detach())
    layer.weight.requires_grad_(False)
    frozen = kept(layer, leaf)
    assert nbytes(both) == nbytes(first) + nbytes(frozen)
    assert 0 < nbytes(frozen) < nbytes(both)
    assert kept(layer, leaf.detach()) == []


class Watched(NVFP4):
    """NVFP4 that counts how often its operands are packed."""

    packed = 0

    def operand(self, x, generator=None):
        return WatchedOperand(NVFP4.operand(self, x, generator))


class WatchedOperand:
    def __init__(self, operand):
        self.scaled = operand.scaled
        self.unwatched = operand.quantized

    def quantized(self):
        Watched.packed += 1
        return self.unwatched()


@each_backward
@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_nothing_is_packed_without_autograd(backward, no_grad):
    layer = make_whole_layer(Watched(), Watched(), backward)
    x = torch.randn(N, I, requires_grad=True)
    Watched.packed = 0
    with no_grad():
        plain = layer(x)
        layer.switch.current = "rollout"
        assert layer(x).equal(plain)
        layer.switch.current = "train"
    assert Watched.packed == 0
    assert layer(x).equal(plain)
    assert Watched.packed == {"high_precision": 0, "dequantized": 2, "quantized": 1}[backward]


def change_between(layer, x, dy, change):
    """dX and dW of a pass in which something changes between forward and backward."""
    x = x.clone().requires_grad_()
    inner = x * 1  # a leaf must not change in place
    layer.zero_grad()
    y = layer(inner)
    with torch.no_grad():
        change(layer, inner)
    y.backward(dy)
    return x.grad, layer.weight.grad


def change_weight(layer, x):
    layer.weight.add_(1)


def change_input(layer, x):
    x.add_(1)


@each_pair
@pytest.mark.parametrize("change", [change_weight, change_input])
@each_backward
def test_a_change_in_place_is_noticed_where_the_original_is_kept(
    weight, activation, backward, change
):
    layer = make_layer(weight, activation, backward, NVFP4_TENSOR)
    x, dy = make_inputs()
    _, dx, dw = run(layer, x, dy)
    changed, format = (layer.weight, weight) if change is change_weight else (x, activation)
    # the quantized backward quantizes X for its wgrad in the forward, and W for its dgrad later
    codes = backward == "dequantized" or (backward == "quantized" and changed is x)
    if codes and format is not None:
        dx_again, dw_again = change_between(layer, x, dy, change)
        assert dx_again.equal(dx)
        assert dw_again.equal(dw)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            change_between(layer, x, dy, change)


@each_backward
def test_a_second_derivative_is_refused(backward):
    layer = make_layer(NVFP4_ROW, NVFP4_ROW, backward, NVFP4_ROW)
    x, dy = make_inputs()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layer(x), x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
@each_backward
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


STOCHASTIC = get_format("nvfp4", rounding="stochastic")


def checkpointed(layer, x, dy, seed):
    """What `run` gives, recomputing the forward."""
    layer.switch.reseed(seed)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = checkpoint(layer, x, use_reentrant=False)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def test_gradient_checkpointing_leaves_the_noise_of_gradients_alone():
    layer = make_layer(NVFP4_TENSOR, NVFP4_TENSOR, "quantized", STOCHASTIC)
    x, dy = make_inputs()
    layer.switch.reseed(3)
    expected = run(layer, x, dy)
    for ours, theirs in zip(checkpointed(layer, x, dy, 3), expected, strict=True):
        assert ours.equal(theirs)


def test_gradient_checkpointing_draws_the_noise_of_the_forward_again():
    """The recomputed X is another draw: just as right on average, but not that of the forward."""
    layer = make_layer(NVFP4_TENSOR, STOCHASTIC, "dequantized")
    x, dy = make_inputs()
    y, _, dw = checkpointed(layer, x, dy, 3)
    noise = torch.Generator().manual_seed(3)
    first, second = (STOCHASTIC.fake_quantize(x, noise) for _ in range(2))
    w_OI = stored(NVFP4_TENSOR, layer.weight).float()
    torch.testing.assert_close(y, first @ w_OI.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dw, dy.T @ second, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(dw, dy.T @ first, rtol=1e-2, atol=1e-2)
