"""What every format promises. A new format file is found and tested here without an edit."""

import itertools

import pytest
import torch
from torch import Tensor

from lightning_qrl.formats import Format, format_names, get_format

SHAPES = [(1,), (7,), (16,), (48,), (0, 16), (1, 16), (3, 0), (4, 33), (2, 3, 40), (5, 128)]


@pytest.fixture(params=format_names())
def fmt(request: pytest.FixtureRequest) -> Format:
    return get_format(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    """Equal bits, not equal numbers: -0 is not 0 here."""
    return x.contiguous().view(torch.int32)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype == torch.float32
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    assert torch.equal(bits(a)[~nan], bits(b)[~nan])


def test_codes_ascend_and_are_symmetric(fmt: Format):
    codes = fmt.codes()
    assert codes.dtype == torch.float32
    assert (codes.diff() > 0).all()
    assert torch.equal(codes, -codes.flip(0))


def test_an_element_is_never_off_the_code_table(fmt: Format):
    q = fmt.quantize(normal(8, 128))
    assert torch.isin(q.layout.element.decode(q.codes), fmt.codes()).all()


def test_every_code_quantizes_to_itself(fmt: Format):
    # The largest code in every block makes the scales take codes to codes.
    codes = fmt.codes()
    x = codes[:, None].repeat(1, 32)
    x[:, ::8] = codes[-1]
    q = fmt.quantize(x)
    assert torch.equal(q.layout.element.decode(q.codes), x)
    torch.testing.assert_close(q.dequantize(), x, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_three_views_of_one_quantization(fmt: Format, shape: tuple[int, ...]):
    x = normal(*shape)
    s, q = fmt.scaled(x), fmt.quantize(x)
    assert s.values.shape == q.codes.shape == x.shape
    assert s.values.dtype == torch.float32
    assert_same_bits(fmt.fake_quantize(x), s.product())
    assert_same_bits(q.dequantize(), s.product())
    if s.outer is not None:
        assert s.outer.dtype == torch.float32
        assert s.outer.shape in ((), (*x.shape[:-1], 1))


@pytest.mark.parametrize("exponent", range(-30, 31, 5))
def test_values_are_exact_in_bf16(fmt: Format, exponent: int):
    values = fmt.scaled(normal(16, 64) * 2.0**exponent).values
    assert torch.equal(values.to(torch.bfloat16).float(), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_the_input_is_kept(fmt: Format, dtype: torch.dtype):
    x = normal(4, 48).to(dtype)
    assert fmt.fake_quantize(x).dtype == dtype
    assert torch.equal(fmt.fake_quantize(x), fmt.fake_quantize(x.float()).to(dtype))
    assert fmt.quantize(x).dequantize(dtype).dtype == dtype


def test_the_input_is_left_alone_and_out_of_the_graph(fmt: Format):
    x = normal(4, 64).requires_grad_()
    before = x.detach().clone()
    assert not fmt.fake_quantize(x).requires_grad
    fmt.quantize(x)
    assert torch.equal(x.detach(), before)
    with torch.inference_mode():
        assert torch.equal(fmt.fake_quantize(before.clone()), fmt.fake_quantize(before))


def test_strides_do_not_matter(fmt: Format):
    x = normal(64, 48)
    for view in (x.t(), x[:, ::2], x[::3], x[:, :1].expand(64, 32), x.t()[None]):
        assert torch.equal(fmt.fake_quantize(view), fmt.fake_quantize(view.contiguous()))
        assert torch.equal(fmt.quantize(view).codes, fmt.quantize(view.contiguous()).codes)


@pytest.mark.parametrize("length", [1, 15, 17, 33])
def test_padding_with_zeros_changes_no_value(fmt: Format, length: int):
    x = normal(3, length)
    padded = torch.cat([x, torch.zeros(3, 64 - length)], -1)
    assert torch.equal(fmt.fake_quantize(padded)[:, :length], fmt.fake_quantize(x))


def test_zeros_stay_zeros(fmt: Format):
    x = normal(4, 64)
    x[1] = 0.0
    x[2, 32:] = 0.0
    assert_same_bits(fmt.fake_quantize(x)[x == 0], torch.zeros(96))
    zeros = torch.zeros(3, 40)
    q = fmt.quantize(zeros)
    assert_same_bits(q.dequantize(), zeros)
    for scale in (q.block_scale, q.outer_scale):
        assert scale is None or scale.isfinite().all()


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1e-38, 1e-30, 1e-8, 1.0, 1e8, 1e30, 3e38])
def test_every_amax_gives_finite_values(fmt: Format, amax: float):
    x = normal(4, 64).clamp(-1, 1) * amax
    x[0, 0], x[1, :32] = amax, 0.0
    y = fmt.fake_quantize(x)
    assert y.isfinite().all()
    if amax >= 1e-30:
        assert (y - x).abs().max() <= 0.25 * amax


def test_a_zero_block_beside_a_huge_one(fmt: Format):
    x = torch.zeros(2, 64)
    x[:, 32:] = torch.finfo(torch.bfloat16).max
    y = fmt.fake_quantize(x)
    assert y.isfinite().all()
    assert (y[:, :32] == 0).all()


def test_a_nan_poisons_its_block_at_most(fmt: Format):
    x = normal(4, 96)
    x[1, 40] = float("nan")
    y = fmt.fake_quantize(x)
    assert y[1, 40].isnan()
    block = fmt.quantize(x).layout.block[1]
    first = 40 // block * block
    outside = torch.ones_like(x, dtype=torch.bool)
    outside[1, first : first + block] = False
    assert y[outside].isfinite().all()
    if block > 1:
        assert y[~outside].isnan().all()
    assert_same_bits(fmt.quantize(x).dequantize(), y)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_infinity_leaves_the_others_alone(fmt: Format, sign: float):
    x = normal(4, 96)
    without = x.clone()
    x[1, 40], without[1, 40] = sign * float("inf"), 0.0
    y, expected = fmt.fake_quantize(x), fmt.fake_quantize(without)
    others = x.isfinite()
    assert torch.equal(y[others], expected[others])
    block = fmt.quantize(x).layout.block[1]
    if fmt.bits == 16:
        assert y[1, 40] == x[1, 40]
    else:
        first = 40 // block * block
        assert y[1, 40].isfinite()
        assert sign * y[1, 40] >= expected[1, first : first + block].abs().max()
    assert_same_bits(fmt.quantize(x).dequantize(), y)


def test_a_scalar_and_integers_are_refused(fmt: Format):
    for x in (torch.tensor(1.0), torch.ones(4, dtype=torch.int32)):
        for method in (fmt.scaled, fmt.quantize, fmt.fake_quantize):
            with pytest.raises(ValueError, match=r"floats of shape \[\.\.\., n\]"):
                method(x)


def test_a_format_is_a_value(fmt: Format):
    same = get_format(fmt.name)
    assert fmt == same
    assert hash(fmt) == hash(same)
    assert str(fmt) == fmt.name
    assert isinstance(fmt.bits, float)


def test_formats_of_different_names_differ():
    for a, b in itertools.combinations(map(get_format, format_names()), 2):
        assert a != b
