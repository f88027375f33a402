"""Stochastic rounding: right on average, reproducible, and apart from all other randomness."""

import pytest
import torch

from lightning_qrl.formats import get_format
from lightning_qrl.formats.integers import SignedInt
from lightning_qrl.formats.rounding import default_generator, up_or_down_
from lightning_qrl.formats.small_float import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat

ELEMENTS = [E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat(3, 0), SignedInt(4), SignedInt(8)]
LARGEST_NOISE = 1 - 2.0**-24
# `rceil` leaves nothing to saturate: what saturates is biased.
FORMATS = [
    get_format("nvfp4", outer_scale="row", rounding="stochastic", scale_floor=2.0**-6),
    get_format("mxfp4", rounding="stochastic", scale_rule="rceil"),
    get_format("mxfp8", rounding="stochastic", scale_rule="rceil"),
    get_format("mxfp6_e3m2", rounding="stochastic", scale_rule="rceil", block=(32, 32)),
    get_format("fp8_e5m2", rounding="stochastic"),
    get_format("e2m1", rounding="stochastic", outer_scale="row"),
    get_format("int4", rounding="stochastic"),
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(element) -> torch.Tensor:
    """Codes, midpoints, and values near to codes."""
    codes = element.codes()[::3]
    steps = codes.diff()
    return torch.cat([codes[:-1] + steps * part for part in (0.0, 0.03, 0.25, 0.5, 0.9, 0.999)])


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_the_mean_is_the_value_to_five_standard_errors(element):
    x = points(element)
    draws = 4000
    rounded = element.round_(
        x.repeat(draws, 1), noise=torch.rand(draws, len(x), generator=generator(0))
    ).double()
    # The exact spread of each, from its two neighbours; a value that is a code never moves.
    codes = element.codes()
    upper = codes[torch.searchsorted(codes, x).clamp_max(len(codes) - 1)].double()
    lower = codes[torch.searchsorted(codes, x, right=True) - 1].double()
    assert ((rounded == upper) | (rounded == lower)).all()
    variance = (upper - x) * (x - lower)
    error = (rounded.mean(0) - x).abs()
    assert (error <= 5 * (variance / draws).sqrt()).all()
    pooled = (rounded.mean(0) - x)[variance > 0] / (variance[variance > 0] / draws).sqrt()
    assert pooled.mean().abs() < 5 / len(pooled) ** 0.5


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("noise", [0.0, 0.5, LARGEST_NOISE])
def test_no_noise_moves_a_value_that_is_a_code(element, noise: float):
    codes = element.codes()
    rounded = element.round_(codes.clone(), noise=torch.full_like(codes, noise))
    assert torch.equal(rounded, codes)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_the_ends_of_the_noise(element):
    x, codes = points(element), element.codes()
    lower = codes[torch.searchsorted(codes, x, right=True) - 1]
    upper = codes[torch.searchsorted(codes, x).clamp_max(len(codes) - 1)]
    largest = torch.full_like(x, LARGEST_NOISE)
    assert torch.equal(element.round_(x.clone(), noise=torch.zeros_like(x)), upper)
    assert torch.equal(element.round_(x.clone(), noise=largest), lower)


def test_up_or_down_saturated_and_odd():
    x = torch.tensor([-1.5, -0.0, 0.25, 3.0, 7.75, float("nan")])
    assert up_or_down_(x.clone(), torch.full_like(x, 0.5))[:5].tolist() == [
        -2.0,
        0.0,
        0.0,
        3.0,
        8.0,
    ]
    assert up_or_down_(x.clone(), torch.zeros_like(x))[:5].tolist() == [-1.0, 0.0, 1.0, 3.0, 8.0]
    assert up_or_down_(x, torch.zeros_like(x))[5].isnan()
    big = torch.tensor([1e30, -1e30])
    assert E2M1.round_(big, noise=torch.full_like(big, LARGEST_NOISE)).tolist() == [6.0, -6.0]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_format_is_unbiased_to_five_standard_errors(fmt):
    x = torch.randn(32, 64, generator=generator(3))
    draws = 600
    g = generator(4)
    ys = torch.stack([fmt.fake_quantize(x, generator=g) for _ in range(draws)]).double()
    # What the scale does not reach saturates, every time: no matter of rounding.
    inside = ys.std(0) > 0
    assert inside.float().mean() > 0.8
    z = (ys.mean(0) - x)[inside] / (ys.std(0)[inside] / draws**0.5)
    assert z.mean().abs() < 5 / len(z) ** 0.5
    assert (z.abs() > 5).float().mean() < 0.01  # rare codes' own spread is not well known


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_seed_gives_the_same_codes_again(fmt):
    x = torch.randn(32, 64, generator=generator(3))
    first = fmt.quantize(x, generator=generator(1))
    assert torch.equal(first.packed, fmt.quantize(x, generator=generator(1)).packed)
    assert not torch.equal(first.packed, fmt.quantize(x, generator=generator(2)).packed)
    assert torch.equal(first.dequantize(), fmt.fake_quantize(x, generator=generator(1)))
    assert torch.equal(fmt.scaled(x, generator(1)).product(), first.dequantize())
    operand = fmt.operand(x, generator(5))  # one draw, however it is taken
    assert torch.equal(operand.quantized().dequantize(), operand.scaled().product())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_torchs_own_generator_is_left_alone(fmt):
    x = torch.randn(32, 64, generator=generator(3))
    before = torch.get_rng_state()
    fmt.fake_quantize(x)
    fmt.quantize(x, generator=generator(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_generator_can_be_seeded():
    fmt, x = FORMATS[0], torch.randn(32, 64, generator=generator(3))
    own = default_generator(x.device)
    own.manual_seed(7)
    first = fmt.fake_quantize(x)
    assert not torch.equal(fmt.fake_quantize(x), first)
    own.manual_seed(7)
    assert torch.equal(fmt.fake_quantize(x), first)
    assert torch.equal(fmt.fake_quantize(x, generator=generator(7)), first)


def test_nearest_rounding_draws_nothing():
    g = generator(0)
    before = g.get_state()
    get_format("nvfp4").fake_quantize(torch.ones(4, 16), generator=g)
    assert torch.equal(g.get_state(), before)
