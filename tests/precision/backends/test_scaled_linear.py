"""The natively multiplied layer beside the emulated one: the same numbers, rounded once.

N tokens, I in features, O out features.
"""

import copy

import pytest
import torch
from torch import nn

from lightning_qrl.formats import get_format
from lightning_qrl.precision import LinearPrecision, QuantLinear
from lightning_qrl.precision.backends.torchao import ScaledLinear
from lightning_qrl.precision.sides import SideSwitch

N, I, O = 7, 40, 24  # noqa: E741 - none a multiple of 16
HALF_ULP_BF16 = 2.0**-8
FP8_TENSOR = get_format("fp8_e4m3")
FP8_ROW = get_format("fp8_e4m3", outer_scale="row")
FP8_NONE = get_format("fp8_e4m3", outer_scale="none")
E5M2 = get_format("fp8_e5m2")
SCALES = [
    (FP8_TENSOR, FP8_TENSOR),
    (FP8_ROW, FP8_ROW),
    (FP8_TENSOR, FP8_ROW),  # the shipped recipe
    (FP8_NONE, FP8_ROW),
]
each_scale = pytest.mark.parametrize(("weight", "activation"), SCALES, ids=str)
each_backward = pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def make_pair(weight, activation, backward, gradient=None, bias=False, device="cpu"):
    """The same layer, natively multiplied and emulated, with BF16 values as its weight."""
    torch.manual_seed(0)
    linear = nn.Linear(I, O, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-2, 1, O)[:, None]).copy_(linear.weight.bfloat16())
    layers = []
    for kind, backend in ((ScaledLinear, "torchao"), (QuantLinear, "emulate")):
        precision = LinearPrecision(weight, activation, gradient, backward, backend)
        own = copy.deepcopy(linear).to(device)
        layers.append(kind.from_linear(own, precision, precision, SideSwitch()))
    return layers


def run(layer, x, dy):
    """Y, dX and dW of one pass."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return {"Y": y.detach(), "dX": x.grad, "dW": layer.weight.grad}


def inputs(device="cpu", tokens=N):
    torch.manual_seed(1)
    x = torch.randn(tokens, I) * torch.logspace(-2, 2, tokens)[:, None]
    return x.bfloat16().to(device), torch.randn(tokens, O).bfloat16().to(device)


def sums(layer, x, dy):
    """The sums of all products without their signs: what errors of adding scale with."""
    x, dy, w = (t.detach().double().abs() for t in (x, dy, layer.weight))
    return {"Y": x @ w.T, "dX": dy @ w, "dW": dy.T @ x}


@each_device
@each_backward
@each_scale
def test_agrees_with_the_emulation_to_one_bf16_rounding(weight, activation, backward, device):
    native, emulated = make_pair(weight, activation, backward, FP8_ROW, device=device)
    x, dy = inputs(device)
    ours = run(emulated, x.float(), dy.float())  # in FP32: the numbers before they are rounded
    theirs = run(native, x, dy)
    magnitudes = sums(emulated, x, dy)
    # Hopper aligns the products of a sum to some 14 bits, others add in FP32.
    adding = 2.0**-12 if device == "cuda" else 2.0**-18
    for name, exact in ours.items():
        assert theirs[name].dtype == (torch.float32 if name == "dW" else torch.bfloat16)
        error = (theirs[name].double() - exact.double()).abs()
        if backward == "dequantized" and name != "Y":
            adding = HALF_ULP_BF16  # dY times the outer scales is rounded too, before it is summed
        bound = HALF_ULP_BF16 * exact.double().abs() + adding * magnitudes[name]
        assert (error <= bound).all(), name


@each_backward
@each_scale
def test_agrees_with_the_emulation_in_fp32(weight, activation, backward):
    native, emulated = make_pair(weight, activation, backward, E5M2, bias=True)
    x, dy = inputs()
    ours, theirs = (run(layer, x.float(), dy.float()) for layer in (emulated, native))
    magnitudes = sums(emulated, x, dy)
    for name, exact in ours.items():
        assert theirs[name].dtype == torch.float32
        error = (theirs[name].double() - exact.double()).abs()
        assert (error <= 2.0**-18 * magnitudes[name]).all(), name


@each_scale
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_backwards_without_codes_are_the_emulations_bit_for_bit(weight, activation, dtype):
    x, dy = (t.to(dtype) for t in inputs())
    for backward in ("high_precision", "dequantized"):
        native, emulated = make_pair(weight, activation, backward)
        ours, theirs = (run(layer, x, dy) for layer in (emulated, native))
        assert theirs["dX"].equal(ours["dX"])
        assert theirs["dW"].equal(ours["dW"])


@each_backward
@pytest.mark.parametrize("tokens", [0, 1, 16, 33])
def test_any_number_of_tokens(backward, tokens):
    native, _ = make_pair(FP8_TENSOR, FP8_ROW, backward, FP8_ROW, bias=True)
    x, dy = inputs(tokens=tokens)
    every = run(native, x, dy)
    assert every["Y"].shape == (tokens, O)
    assert all(result.isfinite().all() for result in every.values())
    shaped = run(native, x.view(1, tokens, 1, I), dy.view(1, tokens, 1, O))
    assert shaped["Y"].view(tokens, O).equal(every["Y"])
    assert shaped["dW"].equal(every["dW"])


def test_a_row_scale_keeps_tokens_apart():
    native, _ = make_pair(FP8_TENSOR, FP8_ROW, "dequantized")
    x, _ = inputs()
    with torch.no_grad():
        assert native(torch.cat([x, 1e6 * torch.ones(3, I).bfloat16()]))[:N].equal(native(x))


@each_backward
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_returns_the_dtypes_of_nn_linear(backward, dtype):
    native, _ = make_pair(FP8_ROW, FP8_ROW, backward, FP8_ROW, bias=True)
    plain = nn.Linear(I, O)
    plain.load_state_dict(native.state_dict())
    x, dy = (t.float() for t in inputs())
    results = []
    for module in (native, plain):
        with torch.autocast("cpu", dtype):
            results.append(run(module, x, dy))
    for name in ("Y", "dX", "dW"):
        ours, theirs = (result[name] for result in results)
        assert ours.dtype == theirs.dtype
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert difference < 0.05  # 8 bits


def test_codes_alone_are_kept_for_the_dequantized_backward():
    native, _ = make_pair(FP8_TENSOR, FP8_ROW, "dequantized")
    x, dy = inputs()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        native(x.requires_grad_()).backward(dy)
    assert sum(t.nbytes for t in kept) == N * I + 4 * N + O * I + 4


def test_while_weights_stand_still_each_is_quantized_once(monkeypatch):
    native, _ = make_pair(FP8_TENSOR, FP8_ROW, "dequantized")
    x, _ = inputs()
    with torch.no_grad():
        expected = native(x)
        native.switch.holds = True
        assert native(x).equal(expected)
        native.weight.zero_()  # the weights stand still, so it may not look again
        assert native(x).equal(expected)
        native.switch.weights.clear()
        assert not native(x).any()


def test_one_side_may_be_emulated_or_plain():
    torch.manual_seed(0)
    native = LinearPrecision(FP8_ROW, FP8_ROW, backend="torchao")
    emulated = LinearPrecision(FP8_ROW, FP8_ROW, backend="emulate")
    linear = nn.Linear(I, O)
    x, _ = inputs()
    for other, reference in (
        (emulated, QuantLinear.from_linear(linear, emulated, emulated, SideSwitch())),
        (None, linear),
    ):
        layer = ScaledLinear.from_linear(linear, native, other, SideSwitch())
        layer.switch.current = "rollout"
        assert layer(x.float()).equal(reference(x.float()))
    assert layer.weight is linear.weight
    assert list(layer.state_dict()) == ["weight", "bias"]
