"""Rounding, encoding and decoding against ml_dtypes, over the whole code space."""

import ml_dtypes
import numpy as np
import pytest
import torch

from lightning_qrl.formats.small_float import E2M1, E4M3, SmallFloat

PAIRS = [
    pytest.param(E2M1, ml_dtypes.float4_e2m1fn, id="e2m1"),
    pytest.param(E4M3, ml_dtypes.float8_e4m3fn, id="e4m3fn"),
]


def critical_points(element: SmallFloat) -> torch.Tensor:
    """All codes, all midpoints, and the FP32 neighbours of each."""
    codes = element.codes()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    inf = torch.tensor(float("inf"))
    return torch.cat([points, torch.nextafter(points, inf), torch.nextafter(points, -inf)])


@pytest.mark.parametrize(("element", "oracle"), PAIRS)
def test_decode_is_the_oracles(element: SmallFloat, oracle: type):
    count = 2 << (element.exponent_bits + element.mantissa_bits)
    every = np.arange(count, dtype=np.uint8)
    expected = torch.from_numpy(every.view(oracle).astype(np.float32))
    decoded = element.decode(torch.from_numpy(every))
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded[~decoded.isnan()], expected[~expected.isnan()])
    assert not torch.signbit(decoded[count // 2])
    assert torch.equal(element.codes(), expected[~expected.isnan()].unique())


@pytest.mark.parametrize(("element", "oracle"), PAIRS)
def test_encode_inverts_decode(element: SmallFloat, oracle: type):
    every = torch.arange(2 << (element.exponent_bits + element.mantissa_bits), dtype=torch.uint8)
    signed = torch.from_numpy(every.numpy().view(oracle).astype(np.float32))
    finite = ~signed.isnan()
    assert torch.equal(element.encode(signed, signed)[finite], every[finite])


def test_nan_has_a_code_in_e4m3_only():
    nan = torch.tensor([float("nan")])
    assert E4M3.encode(nan, nan.abs()).item() == 0x7F
    assert E2M1.encode(nan, nan.abs()).item() == 0


@pytest.mark.parametrize(("element", "oracle"), PAIRS)
@pytest.mark.parametrize("with_scratch", [False, True])
def test_rounding_at_every_code_and_midpoint(element: SmallFloat, oracle: type, with_scratch: bool):
    points = critical_points(element).clamp(-element.largest, element.largest)
    expected = torch.from_numpy(points.numpy().astype(oracle).astype(np.float32))
    scratch = torch.full_like(points, float("nan")) if with_scratch else None
    assert torch.equal(element.round_(points.clone(), scratch), expected)


@pytest.mark.parametrize(("element", "oracle"), PAIRS)
def test_rounding_over_all_exponents(element: SmallFloat, oracle: type):
    step = torch.arange(-(2**31), 2**31, 65_521 * 64).to(torch.int32).view(torch.float32)
    points = step[step.isfinite()].clamp(-element.largest, element.largest)
    expected = torch.from_numpy(points.numpy().astype(oracle).astype(np.float32))
    assert torch.equal(element.round_(points.clone()), expected)


@pytest.mark.parametrize("element", [E2M1, E4M3])
def test_rounding_saturates_keeps_nan_and_is_idempotent(element: SmallFloat):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, 1e38, -element.largest * 1.001, nan])
    y = element.round_(x)
    assert y[:4].tolist() == [element.largest, -element.largest, element.largest, -element.largest]
    assert y[4].isnan()
    assert torch.equal(element.round_(element.codes()), element.codes())


def test_negative_values_that_round_to_zero_give_positive_zero():
    assert not torch.signbit(E2M1.round_(torch.tensor([-0.1, -0.0, -0.25]))).any()
