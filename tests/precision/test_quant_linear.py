"""`QuantLinear` as a module: it stands in for `nn.Linear`, copies, and samples."""

import copy

import torch
from linear_oracle import (
    FP8_ROW,
    NVFP4_ROW,
    NVFP4_TENSOR,
    I,
    O,
    make_inputs,
    make_layer,
    run,
)
from torch import nn

from lightning_qrl.formats import get_format
from lightning_qrl.formats.nvfp4 import NVFP4
from lightning_qrl.precision import LinearPrecision, QuantLinear
from lightning_qrl.precision.sides import SideSwitch


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


class Counted(NVFP4):
    """NVFP4 that counts what it quantizes."""

    calls: list[tuple[int, ...]] = []

    def operand(self, x, generator=None):
        self.calls.append(tuple(x.shape))
        return NVFP4.operand(self, x, generator)


def test_while_weights_stand_still_each_is_quantized_once():
    layer = make_layer(Counted(), None)
    x, _ = make_inputs()
    Counted.calls.clear()
    with torch.no_grad():
        layer.switch.holds = True
        first = [layer(x) for _ in range(3)]
        assert Counted.calls == [(O, I)]
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert layer(x).equal(first[0])
        layer.switch.holds = False
        Counted.calls.clear()
        layer(x)
        layer(x)
    assert Counted.calls == [(O, I)] * 2
