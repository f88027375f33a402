"""Rounding, encoding and decoding over the whole code space of every small float.

Oracles: ml_dtypes and torchao for the floats that they know, for all of them the definition of a
code's value in float64 and a search for the nearest.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats.kernels import (
    f4_unpacked_to_f32,
    f6_e2m3_unpacked_to_f32,
    f6_e3m2_unpacked_to_f32,
    f32_to_f4_unpacked,
    f32_to_f6_e2m3_unpacked,
    f32_to_f6_e3m2_unpacked,
)

from lightning_qrl.formats.small_float import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat

PAIRS = [
    pytest.param(E2M1, ml_dtypes.float4_e2m1fn, id="e2m1"),
    pytest.param(E2M3, ml_dtypes.float6_e2m3fn, id="e2m3"),
    pytest.param(E3M2, ml_dtypes.float6_e3m2fn, id="e3m2"),
    pytest.param(E4M3, ml_dtypes.float8_e4m3fn, id="e4m3fn"),
    pytest.param(E5M2, ml_dtypes.float8_e5m2, id="e5m2"),
]
EVERY = [
    pytest.param(SmallFloat(e, m), id=f"e{e}m{m}")
    for e, m in itertools.product(range(1, 8), range(7))
    if e + m <= 7
]


def definition(element: SmallFloat) -> np.ndarray:
    """The value of every non-negative code, float64; NaN where the code is no number."""
    e, m = element.exponent_bits, element.mantissa_bits
    bias = 2 ** (e - 1) - 1
    codes = np.arange(2 ** (e + m))
    field, mantissa = codes >> m, (codes & (2**m - 1)) / 2**m
    normal = (1 + mantissa) * 2.0 ** (field - bias)
    values = np.where(field == 0, mantissa * 2.0 ** (1 - bias), normal)
    if (e, m) == (4, 3):
        values[-1] = np.nan
    if (e, m) == (5, 2):
        values[-4:] = np.nan
    return values


def nearest_even(element: SmallFloat, x: np.ndarray) -> np.ndarray:
    """The nearest value of each x, float64; a tie takes the even code."""
    values = definition(element)
    values = values[~np.isnan(values)]
    size = np.minimum(np.abs(x), values[-1])
    upper = np.searchsorted(values, size).clip(0, len(values) - 1)
    lower = (upper - 1).clip(0)
    up, down = values[upper] - size, size - values[lower]
    to_even = upper % 2 == 0
    if element.mantissa_bits == 0:  # powers of two are all odd: as IEEE has it, the larger
        to_even = lower > 0
    take_upper = (up < down) | ((up == down) & to_even)
    return np.copysign(np.where(take_upper, values[upper], values[lower]), x) + 0.0


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
    expected = torch.where(expected.isfinite(), expected, torch.nan)  # no code is an infinity here
    decoded = element.decode(torch.from_numpy(every))
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded[~decoded.isnan()], expected[~expected.isnan()])
    assert not torch.signbit(decoded[count // 2])
    assert torch.equal(element.codes(), expected[~expected.isnan()].unique())


@pytest.mark.parametrize("element", EVERY)
def test_every_code_means_what_its_definition_says(element: SmallFloat):
    half = torch.from_numpy(definition(element)).float()
    every = torch.arange(2 * len(half)).to(torch.uint8)
    expected = torch.cat([half, -half])
    decoded = element.decode(every)
    numbers = ~expected.isnan()
    assert torch.equal(decoded.isnan(), ~numbers)
    assert torch.equal(decoded[numbers], expected[numbers])
    assert not torch.signbit(decoded[len(half)])
    assert torch.equal(element.encode(decoded, expected)[numbers], every[numbers])
    positive = half[~half.isnan()]
    assert element.largest == positive[-1]
    assert element.smallest == positive[1]
    assert element.bits == 1 + element.exponent_bits + element.mantissa_bits


@pytest.mark.parametrize("element", EVERY)
def test_rounding_is_to_the_nearest_value(element: SmallFloat):
    points = critical_points(element)
    expected = torch.from_numpy(nearest_even(element, points.double().numpy())).float()
    assert torch.equal(element.round_(points.clone()), expected)
    assert not torch.signbit(element.round_(points.clone())[expected == 0]).any()


@pytest.mark.parametrize(
    ("element", "to_codes", "to_fp32"),
    [
        (E2M1, f32_to_f4_unpacked, f4_unpacked_to_f32),
        (E2M3, f32_to_f6_e2m3_unpacked, f6_e2m3_unpacked_to_f32),
        (E3M2, f32_to_f6_e3m2_unpacked, f6_e3m2_unpacked_to_f32),
    ],
)
def test_codes_are_torchaos(element: SmallFloat, to_codes, to_fp32):
    points = critical_points(element)
    assert torch.equal(element.encode(element.round_(points.clone()), points), to_codes(points))
    every = torch.arange(1 << element.bits).to(torch.uint8)
    assert torch.equal(element.decode(every), to_fp32(every))


@pytest.mark.parametrize(("element", "oracle"), PAIRS)
def test_encode_inverts_decode(element: SmallFloat, oracle: type):
    every = torch.arange(2 << (element.exponent_bits + element.mantissa_bits), dtype=torch.uint8)
    signed = torch.from_numpy(every.numpy().view(oracle).astype(np.float32))
    finite = signed.isfinite()
    assert torch.equal(element.encode(signed, signed)[finite], every[finite])


def test_nan_has_a_code_in_fp8_only():
    nan = torch.tensor([float("nan")])
    assert E4M3.encode(nan, nan.abs()).item() == 0x7F
    assert E5M2.encode(nan, nan.abs()).item() == 0x7F
    for element in (E2M1, E2M3, E3M2, SmallFloat(4, 2), SmallFloat(3, 4)):
        assert not element.has_nan
        assert element.encode(nan, nan.abs()).item() == 0


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


@pytest.mark.parametrize("element", EVERY)
def test_rounding_saturates_keeps_nan_and_is_idempotent(element: SmallFloat):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, 1e38, -element.largest * 1.001, nan])
    y = element.round_(x)
    assert y[:4].tolist() == [element.largest, -element.largest, element.largest, -element.largest]
    assert y[4].isnan()
    assert torch.equal(element.round_(element.codes()), element.codes())


def test_negative_values_that_round_to_zero_give_positive_zero():
    assert not torch.signbit(E2M1.round_(torch.tensor([-0.1, -0.0, -0.25]))).any()
