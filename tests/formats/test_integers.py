"""Integers against torchao's quantization primitives, ml_dtypes' codes, and float64."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from lightning_qrl.formats import get_format
from lightning_qrl.formats.integers import SignedInt

WIDTHS = [2, 3, 4, 8]


def torchao(
    x: torch.Tensor, bits: int, block: tuple[int, int], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Symmetric: integers, scales, dequantized; its scales are amax / largest too."""
    largest = 2 ** (bits - 1) - 1
    limits = {"quant_min": -largest, "quant_max": largest}
    if scale is None:
        scale, _ = choose_qparams_affine(
            x,
            MappingType.SYMMETRIC_NO_CLIPPING_ERR,
            block,
            torch.int8,
            eps=2.0**-126,
            scale_dtype=torch.float32,
            **limits,
        )
    zero = torch.zeros_like(scale, dtype=torch.int32)
    numbers = quantize_affine(x, block, scale, zero, torch.int8, **limits)
    return numbers, scale, dequantize_affine(numbers, block, scale, zero, torch.int8, **limits)


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_code(bits: int):
    element = SignedInt(bits)
    largest = 2 ** (bits - 1) - 1
    every = torch.arange(1 << bits)
    expected = torch.where(every > largest, every - (1 << bits), every).float()
    codes = every.to(torch.uint8)
    assert torch.equal(element.decode(codes), expected)
    assert torch.equal(element.encode(expected, expected), codes)
    assert torch.equal(element.codes(), torch.arange(-largest, largest + 1.0))
    assert element.encode(torch.tensor([torch.nan]), torch.zeros(1)).item() == 0


@pytest.mark.parametrize(("bits", "oracle"), [(2, ml_dtypes.int2), (4, ml_dtypes.int4)])
def test_codes_are_ml_dtypes(bits: int, oracle: type):
    numbers = SignedInt(bits).codes()
    theirs = numbers.numpy().astype(oracle).view(np.uint8) & ((1 << bits) - 1)
    assert torch.equal(SignedInt(bits).encode(numbers, numbers), torch.from_numpy(theirs))


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_midpoint_and_both_its_neighbours(bits: int):
    element = SignedInt(bits)
    halves = torch.arange(-2 * element.largest - 3, 2 * element.largest + 4) / 2
    inf = torch.tensor(torch.inf)
    points = torch.cat([halves, torch.nextafter(halves, inf), torch.nextafter(halves, -inf)])
    expected = np.rint(points.double().numpy()).clip(-element.largest, element.largest)
    rounded = element.round_(points.clone())
    assert torch.equal(rounded, torch.from_numpy(expected).float())
    assert not torch.signbit(rounded[rounded == 0]).any()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("outer_scale", ["tensor", "row"])
def test_torchao_agrees_under_an_outer_scale(bits: int, outer_scale: str):
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(bits)) * 17
    numbers, scale, values = torchao(x, bits, (1 if outer_scale == "row" else 32, 96))
    fmt = get_format(f"int{bits}", outer_scale=outer_scale)
    assert torch.equal(fmt.scaled(x).outer.flatten(), scale.flatten())
    # torchao multiplies by the reciprocal: one rounding more, which a tie can feel.
    differs = fmt.scaled(x).values != numbers
    assert differs.float().mean() < 1e-3
    assert torch.equal(fmt.fake_quantize(x)[~differs], values[~differs])


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("group", [16, 32, 96])
def test_groups_have_a_bf16_scale(bits: int, group: int):
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(bits)) * 17
    q = get_format(f"int{bits}", outer_scale="none", block=(1, group)).quantize(x)
    _, fp32_scale, _ = torchao(x, bits, (1, group))
    scale = fp32_scale.bfloat16()
    assert torch.equal(q.scale_codes.flatten(), scale.flatten())
    numbers, _, values = torchao(x, bits, (1, group), scale.float())
    differs = q.layout.element.decode(q.codes) != numbers
    assert differs.float().mean() < 1e-3
    assert torch.equal(q.dequantize()[~differs], values[~differs])
    exact = x.double().view(32, -1, group) / q.block_scale.double()[..., None]
    largest = 2.0 ** (bits - 1) - 1
    expected = exact.round().clamp(-largest, largest).view(32, 96)
    assert torch.equal(q.layout.element.decode(q.codes).double(), expected)


def test_bytes_of_groups():
    x = torch.randn(64, 256)
    q = get_format("int4", outer_scale="none", block=(1, 128)).quantize(x)
    assert q.nbytes == 64 * 128 + 64 * 2 * 2
    assert get_format("int4", outer_scale="none", block=(1, 128)).bits == 4.125


def test_a_group_of_tiny_or_huge_numbers():
    fmt = get_format("int4", outer_scale="none", block=(1, 8))
    x = torch.tensor([[1e-41] * 8 + [3.4e38] * 8 + [1.0] * 8])
    y = fmt.fake_quantize(x)
    assert y.isfinite().all()
    assert (y[0, :8] <= 2e-40).all()
    torch.testing.assert_close(y[0, 8:], x[0, 8:], rtol=1e-2, atol=0.0)
