"""What every format promises. A new format file is found and tested here without an edit."""

import itertools

import pytest
import torch
from torch import Tensor

from lightning_qrl.formats import Format, format_names, get_format

SHAPES = [(1,), (7,), (16,), (48,), (0, 16), (1, 16), (3, 0), (4, 33), (2, 3, 40), (5, 128)]

MX_RULES = [("mxfp4", {"scale_rule": rule}) for rule in ("ceil", "rceil", "even")]
OPTIONS: list[tuple[str, dict[str, object]]] = [
    ("e2m1", {"outer_scale": "row"}),
    ("e3m2", {"outer_scale": "none"}),
    ("e1m6", {}),
    ("e7m0", {}),
    ("fp8_e4m3", {"outer_scale": "row", "hadamard": 16}),
    ("fp8_e5m2", {"outer_scale": "none"}),
    ("fp8_e4m3", {"block": (1, 128), "outer_scale": "none"}),
    ("fp8_e5m2", {"block": (128, 128), "outer_scale": "none"}),
    ("fp8_e4m3", {"block": (128, 128), "outer_scale": "none", "block_scale": "e8m0"}),
    ("e1m6", {"block": (1, 128), "outer_scale": "none", "block_scale": "e8m0"}),
    ("e7m0", {"block": (1, 128), "outer_scale": "none"}),
    ("e2m1", {"block": (1, 128), "outer_scale": "none", "hadamard": 32}),
    *MX_RULES,
    ("mxfp8", {"block": (32, 32)}),
    ("mxfp6_e2m3", {"scale_rule": "ceil", "hadamard": 32}),
    ("nvfp4", {"outer_scale": "row"}),
    ("nvfp4", {"outer_scale": "none"}),
    ("nvfp4", {"outer_scale": "row", "four_over_six": "mae"}),
    ("nvfp4", {"four_over_six": "mse"}),
    ("nvfp4", {"block": (16, 16)}),
    ("nvfp4", {"block": (16, 16), "four_over_six": "mae"}),
    ("nvfp4", {"block": (16, 16), "outer_scale": "none", "four_over_six": "mse"}),
    ("nvfp4", {"scale_floor": 2.0**-6}),
    ("nvfp4", {"hadamard": 16, "outer_scale": "row"}),
    ("nvfp4", {"hadamard": 32, "block": (16, 16)}),
    ("int8", {"outer_scale": "tensor"}),
    ("int4", {"outer_scale": "none", "block": (1, 32)}),
    ("int3", {"outer_scale": "none", "block": (1, 20)}),
    ("int2", {"outer_scale": "none"}),
]
VARIANTS = [get_format(name) for name in format_names()]
VARIANTS += [get_format(name, **options) for name, options in OPTIONS]


def hadamard(fmt: Format) -> object:
    return getattr(fmt, "hadamard", "none")


def outer_scale(fmt: Format) -> str:
    return getattr(fmt, "outer_scale", "none")


def has_codes(fmt: Format) -> bool:
    """Whether its elements are its own, not a cast of PyTorch's."""
    return fmt.bits < 16


def scale_adapts(fmt: Format) -> bool:
    """Whether any amax comes into the range of the format."""
    return has_codes(fmt) and (outer_scale(fmt) != "none" or "mx" in fmt.name or blocked(fmt))


def blocked(fmt: Format) -> bool:
    """Whether blocks are an option of it, and on."""
    return not fmt.name.startswith(("mx", "nv")) and getattr(fmt, "block", (1, 1)) != (1, 1)


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture(params=[f for f in VARIANTS if hadamard(f) == "none"], ids=str)
def unrotated(request: pytest.FixtureRequest) -> Format:
    return request.param


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
def test_three_views_of_one_quantization(variant: Format, shape: tuple[int, ...]):
    x = normal(*shape)
    s, q = variant.scaled(x), variant.quantize(x)
    if hadamard(variant) == "none":
        assert s.values.shape == q.codes.shape == x.shape
    assert s.values.dtype == torch.float32
    assert_same_bits(q.values(), s.values)
    assert_same_bits(variant.fake_quantize(x), s.product())
    assert_same_bits(q.dequantize(), s.product())
    assert s.product().shape == x.shape
    if s.outer is not None:
        assert s.outer.dtype == torch.float32
        assert s.outer.shape in ((), (*x.shape[:-1], 1))


@pytest.mark.parametrize("shape", [(64, 256), (32, 96), (1, 320)])
def test_the_stored_bytes_are_the_formats(variant: Format, shape: tuple[int, ...]):
    x = normal(*shape)
    q = variant.quantize(x)
    rows = max(q.layout.block[0], shape[0])
    length = -(-shape[1] // q.layout.block[1]) * q.layout.block[1]
    if rows == shape[0] and length == shape[1]:  # whole blocks
        outer = 0 if q.outer_scale is None else q.outer_scale.nbytes
        assert q.nbytes == variant.bits * x.numel() / 8 + outer
    assert q.packed.nbytes == x.numel() * q.layout.element.bits / 8


def test_values_are_exact_in_bf16(fmt: Format):
    dtype = torch.float16 if fmt.name == "fp16" else torch.bfloat16
    for exponent in range(-30, 31, 5):
        values = fmt.scaled(normal(16, 64) * 2.0**exponent).values
        assert torch.equal(values.to(dtype).float(), values), exponent


@pytest.mark.parametrize("exponent", [-20, 0, 20])
def test_values_of_every_option_are_exact_in_bf16(variant: Format, exponent: int):
    values = variant.scaled(normal(16, 64) * 2.0**exponent).values
    int_groups = variant.name.startswith("int") and blocked(variant)
    if int_groups or variant.wide:  # as their modules say
        assert not torch.equal(values.to(torch.bfloat16).float(), values) or exponent < 0
    else:
        assert torch.equal(values.to(torch.bfloat16).float(), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_the_input_is_kept(variant: Format, dtype: torch.dtype):
    x = normal(4, 48).to(dtype)
    assert variant.fake_quantize(x).dtype == dtype
    assert torch.equal(variant.fake_quantize(x), variant.fake_quantize(x.float()).to(dtype))
    assert variant.quantize(x).dequantize(dtype).dtype == dtype
    assert torch.equal(variant.quantize(x).dequantize(dtype), variant.fake_quantize(x))


def test_the_input_is_left_alone_and_out_of_the_graph(variant: Format):
    x = normal(4, 64).requires_grad_()
    before = x.detach().clone()
    assert not variant.fake_quantize(x).requires_grad
    variant.quantize(x)
    assert torch.equal(x.detach(), before)
    with torch.inference_mode():
        assert torch.equal(variant.fake_quantize(before.clone()), variant.fake_quantize(before))


def test_strides_do_not_matter(variant: Format):
    x = normal(64, 48)
    for view in (x.t(), x[:, ::2], x[::3], x[:, :1].expand(64, 32), x.t()[None]):
        whole = view.contiguous()
        assert torch.equal(variant.fake_quantize(view), variant.fake_quantize(whole))
        assert torch.equal(variant.quantize(view).codes, variant.quantize(whole).codes)


@pytest.mark.parametrize("length", [1, 15, 17, 33])
def test_padding_with_zeros_changes_no_value(variant: Format, length: int):
    x = normal(3, length)
    padded = torch.cat([x, torch.zeros(3, 64 - length)], -1)
    assert torch.equal(variant.fake_quantize(padded)[:, :length], variant.fake_quantize(x))
    more_rows = torch.cat([x, torch.zeros(30, length)])
    assert torch.equal(variant.fake_quantize(more_rows)[:3], variant.fake_quantize(x))


@pytest.mark.parametrize("lead", [(), (1,), (2, 5), (2, 1, 3)])
def test_any_leading_shape(variant: Format, lead: tuple[int, ...]):
    # Matrices of 20 rows: blocks of 16 or 32 rows must not cross into the next one.
    x = normal(*lead, 20, 40)
    x[..., 0, 0] = 9.0  # one outer scale for all
    y = variant.fake_quantize(x)
    q = variant.quantize(x)
    assert_same_bits(q.dequantize(), y)
    flat = x.reshape(-1, 20, 40)
    if hadamard(variant) != "none":
        assert y.shape == x.shape
        return
    each = torch.stack([variant.fake_quantize(matrix) for matrix in flat])
    assert_same_bits(y.reshape(-1, 20, 40), each)
    if variant.quantize(x).layout.block[0] == 1:
        assert_same_bits(variant.fake_quantize(x.reshape(-1, 40)), each.reshape(-1, 40))


@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (2, 0, 48)])
def test_one_token_and_none(variant: Format, shape: tuple[int, ...]):
    x = normal(*shape)
    assert variant.fake_quantize(x).shape == x.shape
    assert variant.quantize(x).dequantize().shape == x.shape
    assert variant.fake_quantize(x).isfinite().all()


def test_zeros_stay_zeros(variant: Format):
    x = normal(4, 64)
    x[1] = 0.0
    x[2, 32:] = 0.0
    zeros_of_x = x == 0
    if hadamard(variant) == "none":
        assert_same_bits(variant.fake_quantize(x)[zeros_of_x], torch.zeros(96))
    zeros = torch.zeros(3, 40)
    for nothing in (zeros, -zeros) if has_codes(variant) else (zeros,):
        q = variant.quantize(nothing)
        assert_same_bits(q.dequantize(), zeros)
        assert_same_bits(variant.fake_quantize(nothing), zeros)
        for scale in (q.block_scale, q.outer_scale):
            assert scale is None or scale.isfinite().all()


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1e-38, 1e-30, 1e-8, 1.0, 1e8, 1e30, 3e38])
def test_every_amax_gives_finite_values(variant: Format, amax: float):
    x = normal(4, 64).clamp(-1, 1) * amax
    x[0, 0], x[1, :32] = amax, 0.0
    y = variant.fake_quantize(x)
    if variant.name == "fp16":
        assert torch.equal(y, x.half().float())
        return
    if amax == 3e38 and hadamard(variant) != "none":
        return  # the sums of a rotation overflow
    assert y.isfinite().all()
    if amax >= 1e-30 and (scale_adapts(variant) or variant.name == "bf16"):
        bound = 0.5 if variant.name == "int2" else 0.25
        assert (y - x).abs().max() <= bound * amax * (1 + 1e-6)


def test_a_zero_block_beside_a_huge_one(variant: Format):
    x = torch.zeros(2, 64)
    x[:, 32:] = torch.finfo(torch.bfloat16).max
    y = variant.fake_quantize(x)
    if hadamard(variant) != "none":
        return  # the sums of a rotation overflow
    assert y.isfinite().all() or variant.name == "fp16"
    assert (y[:, :32] == 0).all()


def poisoned(fmt: Format, x: Tensor, row: int, column: int) -> Tensor:
    """Where a NaN at [row, column] may be felt."""
    q = fmt.quantize(x)
    layout, (rows, size) = q.layout, q.layout.block
    size = max(size, 1 if layout.rotation == "none" else layout.rotation)
    reached = torch.zeros_like(x, dtype=torch.bool)
    top, left = row // rows * rows, column // size * size
    reached[top : top + rows, left : left + size] = True
    if q.block_scale is None and outer_scale(fmt) != "none" and not layout.element.has_nan:
        # No code says NaN: the outer scale does.
        reached[row if outer_scale(fmt) == "row" else slice(None)] = True
    return reached


def test_a_nan_poisons_its_block_and_nothing_else(variant: Format):
    x = normal(40, 96)
    x[17, 40] = float("nan")
    y = variant.fake_quantize(x)
    reached = poisoned(variant, x, 17, 40)
    assert y[~reached].isfinite().all()
    assert y[reached].isnan().all()
    q = variant.quantize(x)
    no_nan = not getattr(q.layout.element, "has_nan", True)
    if q.block_scale is None and outer_scale(variant) == "none" and no_nan:
        y = y.nan_to_num(nan=0.0)  # neither a code nor a scale can say it
    assert_same_bits(q.dequantize(), y)
    without = x.clone()
    without[reached] = 0.0  # the NaN counts for no amax outside of its block
    if outer_scale(variant) != "tensor" and hadamard(variant) == "none" and reached.any():
        rest = variant.fake_quantize(without)
        elsewhere = ~reached.any(-1) if outer_scale(variant) == "row" else ~reached
        assert_same_bits(rest[elsewhere], y[elsewhere])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_infinity_leaves_the_others_alone(unrotated: Format, sign: float):
    x = normal(40, 96)
    without = x.clone()
    x[17, 40], without[17, 40] = sign * float("inf"), 0.0
    y, expected = unrotated.fake_quantize(x), unrotated.fake_quantize(without)
    assert_same_bits(unrotated.quantize(x).dequantize(), y)
    others = x.isfinite()
    if getattr(unrotated, "four_over_six", "none") != "none":
        # Both candidates' errors are infinite there, and a tie takes 6.
        others &= ~poisoned(unrotated, x, 17, 40)
    assert torch.equal(y[others], expected[others])
    if not has_codes(unrotated):
        assert y[17, 40] == x[17, 40]
        return
    assert y[17, 40].isfinite()
    largest = expected[poisoned(unrotated, x, 17, 40)].abs().max()
    # Mapped to 6 instead of 4, a block may reach a rounded scale less far.
    slack = 1.0 if getattr(unrotated, "four_over_six", "none") == "none" else 0.66
    assert sign * y[17, 40] >= largest * slack


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_e4m3", "int8"])
def test_an_infinity_in_a_rotation_poisons_what_it_is_rotated_with(name: str):
    fmt = get_format(name, hadamard=16, **({} if "mx" in name else {"outer_scale": "row"}))
    x = normal(3, 96)
    expected = fmt.fake_quantize(x)
    x[1, 40] = float("inf")
    y = fmt.fake_quantize(x)
    assert torch.equal(y[[0, 2]], expected[[0, 2]])
    assert y[1, 32:48].isnan().all()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("size", [16, 32])
def test_a_rotation_of_the_largest_numbers_is_finite(name: str, size: int):
    x = torch.full((4, 40), 3.4e38) * normal(4, 40).sign()
    assert get_format(name, hadamard=size).fake_quantize(x).isfinite().all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_subnormals_go_to_a_neighbour_or_zero(fmt: Format, rounding: str):
    if not has_codes(fmt):
        return
    fmt = get_format(fmt.name, rounding=rounding)
    x = torch.tensor([[k * 2.0**-149 for k in range(-16, 16)]])
    y = fmt.fake_quantize(x)
    assert y.isfinite().all()
    assert (y * x >= 0).all()
    assert (y.abs() <= 2.0**-124).all()


def test_a_scalar_and_integers_are_refused(variant: Format):
    for x in (torch.tensor(1.0), torch.ones(4, dtype=torch.int32)):
        for method in (variant.scaled, variant.quantize, variant.fake_quantize):
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
