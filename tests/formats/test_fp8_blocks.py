"""FP8 in blocks of 1x128 and 128x128 against torchao and float64; both kinds of scales; edges."""

import pytest
import torch
from torch import Tensor
from torchao.quantization.quant_primitives import (
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
)

from lightning_qrl.formats import Format, get_format

BLOCKS = [(1, 128), (128, 128)]
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}

each_block = pytest.mark.parametrize("block", BLOCKS, ids=str)
each_name = pytest.mark.parametrize("name", list(DTYPES))


def blocks(
    block: tuple[int, int] = (1, 128), block_scale: str = "fp32", name: str = "fp8_e4m3", **more
) -> Format:
    return get_format(name, block=block, block_scale=block_scale, outer_scale="none", **more)


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.exp2(6 * torch.randn(*shape, generator=generator))


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    assert torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


@each_block
@each_name
@pytest.mark.parametrize("exponent", [-60, 0, 60])
def test_codes_scales_and_values_are_torchaos(block, name, exponent):
    x = spread(256, 384) * 2.0**exponent
    q, dtype = blocks(block, name=name).quantize(x), DTYPES[name]
    scale = _choose_scale_float8(x, list(block), dtype)
    codes = _quantize_affine_float8(x, scale, dtype)
    assert torch.equal(q.block_scale, scale)
    assert torch.equal(q.codes, codes.view(torch.uint8))
    assert_same_bits(q.dequantize(), _dequantize_affine_float8(codes, scale) + 0.0)
    assert_same_bits(blocks(block, name=name).fake_quantize(x), q.dequantize())


@each_block
@each_name
def test_powers_of_two_are_the_least_that_saturate_nothing(block, name):
    x = spread(256, 384)
    q = blocks(block, "e8m0", name).quantize(x)
    rows, columns = block
    amax = x.abs().double().view(256 // rows, rows, 384 // columns, columns).amax((1, 3))
    assert (torch.frexp(q.block_scale).mantissa == 0.5).all()
    scale = q.block_scale.double()
    assert (scale * LARGEST[name] >= amax).all()
    assert (scale * LARGEST[name] < 2 * amax).all()
    each = q.block_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert torch.equal(q.codes, (x / each).to(DTYPES[name]).view(torch.uint8))


def test_powers_of_two_change_one_ulp_above_the_largest_code():
    fmt = blocks((1, 128), "e8m0")
    for exponent in (-100, -1, 0, 7, 100):
        step = torch.full((1, 128), 448.0 * 2.0**exponent)
        above = torch.nextafter(step, torch.tensor(torch.inf))
        assert fmt.quantize(step).block_scale.item() == 2.0**exponent
        assert fmt.quantize(above).block_scale.item() == 2.0 ** (exponent + 1)


@pytest.mark.parametrize(
    ("block", "block_scale", "bits"),
    [
        ((1, 128), "fp32", 8 + 32 / 128),
        ((128, 128), "fp32", 8 + 32 / 128**2),
        ((1, 128), "e8m0", 8 + 8 / 128),
        ((128, 128), "e8m0", 8 + 8 / 128**2),
    ],
)
def test_stored_bits(block, block_scale, bits):
    fmt = blocks(block, block_scale)
    q = fmt.quantize(spread(3, 256, 512))
    assert fmt.bits == bits
    assert q.nbytes == bits / 8 * 3 * 256 * 512
    assert q.scale_codes.dtype == (torch.float32 if block_scale == "fp32" else torch.uint8)
    assert q.scale_codes.shape == (3, 256 // block[0], 4)


@each_block
def test_only_fp32_scales_need_more_bits_than_bf16_has(block):
    x = spread(128, 256)
    for fmt in (blocks(block), blocks(block, "e8m0")):
        values = fmt.scaled(x).values
        assert torch.equal(values, values.bfloat16().float()) is not fmt.wide
    assert blocks(block).wide
    assert not blocks(block, "e8m0").wide
    assert not get_format("fp8_e4m3").wide


def test_again_the_same():
    """Powers of two give the very values; FP32 scales the codes, the scale being an ulp off."""
    x = spread(128, 256)
    for block in BLOCKS:
        exact, near = blocks(block, "e8m0"), blocks(block)
        once = exact.fake_quantize(x)
        assert_same_bits(exact.fake_quantize(once), once)
        once = near.fake_quantize(x)
        again = near.quantize(once)
        assert torch.equal(again.codes % 128, near.quantize(x).codes % 128)  # but for signs of 0
        torch.testing.assert_close(again.dequantize(), once, rtol=2.0**-22, atol=0.0)


@pytest.mark.parametrize("block_scale", ["fp32", "e8m0"])
def test_a_matrix_and_its_transpose_have_the_same_codes(block_scale):
    fmt, x = blocks((128, 128), block_scale), spread(200, 300)
    q, transposed = fmt.quantize(x), fmt.quantize(x.t())
    assert torch.equal(q.codes.t(), transposed.codes)
    assert torch.equal(q.block_scale.t(), transposed.block_scale)


@pytest.mark.parametrize("block_scale", ["fp32", "e8m0"])
@each_block
@pytest.mark.parametrize("shape", [(1,), (127,), (130, 129), (2, 3, 200, 300)])
def test_any_shape_is_filled_up_with_zeros(block_scale, block, shape):
    fmt, x = blocks(block, block_scale), spread(*shape)
    y, q = fmt.fake_quantize(x), fmt.quantize(x)
    assert_same_bits(q.dequantize(), y)
    matrices = x.reshape(-1, *x.shape[-2:]) if x.ndim > 1 else x[None, None]
    whole = torch.zeros(len(matrices), *(-(-size // 128) * 128 for size in matrices.shape[1:]))
    part = (slice(None), *(slice(size) for size in matrices.shape[1:]))
    whole[part] = matrices
    for filled, matrix in zip(whole, y.reshape(matrices.shape), strict=True):
        assert_same_bits(fmt.fake_quantize(filled)[part[1:]], matrix)


@pytest.mark.parametrize("block_scale", ["fp32", "e8m0"])
@each_block
def test_nan_infinity_and_zeros_stay_in_their_block(block_scale, block):
    fmt, x = blocks(block, block_scale), spread(256, 384)
    expected = fmt.fake_quantize(x)
    x[5, 5], x[140, 300], x[:128, 128:256] = torch.nan, -torch.inf, -0.0
    q = fmt.quantize(x)
    y = q.dequantize()
    assert_same_bits(fmt.fake_quantize(x), y)
    rows = block[0]
    poisoned = torch.zeros_like(x, dtype=torch.bool)
    poisoned[5 // rows * rows : 5 // rows * rows + rows, :128] = True
    assert torch.equal(y.isnan(), poisoned)
    assert q.block_scale.isnan().sum() == 1
    assert_same_bits(y[:128, 128:256], torch.zeros(128, 128))
    scale = q.block_scale[140 // rows, 2]
    assert y[140, 300] == -448 * scale
    untouched = ~poisoned
    untouched[:128, 128:256] = False
    untouched[128:, 256:] = False
    assert_same_bits(y[untouched], expected[untouched])
    finite = x.nan_to_num(neginf=0.0)[128:, 256:]  # an infinity counts for no amax
    others = finite != 0
    assert_same_bits(y[128:, 256:][others], fmt.fake_quantize(finite)[others])


@pytest.mark.parametrize(
    "fmt",
    [
        *(
            blocks((1, 128), block_scale, name)
            for block_scale in ("fp32", "e8m0")
            for name in ("fp8_e4m3", "fp8_e5m2", "e2m1", "e7m0", "e1m6")
        ),
        *(get_format(name, outer_scale="row") for name in ("fp8_e4m3", "e1m6", "int8")),
    ],
    ids=str,
)
def test_every_amax_keeps_scale_and_values_finite(fmt):
    top = torch.tensor(torch.finfo(torch.float32).max)  # an ulp decides what overflows
    amax = torch.stack([*(top * (1 - k * 2.0**-24) for k in range(0, 64, 2)), top / 3])
    amax = torch.cat([amax, torch.tensor([0.0, 1e-45, 1e-40, 1e-38, 2.0**-126, 1.0])])
    x = torch.linspace(-1, 1, 128) * amax[:, None]
    q = fmt.quantize(x)
    scale = q.outer_scale if q.block_scale is None else q.block_scale
    assert (scale >= 2.0**-126).all()
    assert q.dequantize().isfinite().all()
    assert_same_bits(q.dequantize(), fmt.fake_quantize(x))


def test_a_row_alone_equals_the_row_in_its_batch():
    x = spread(6, 300)
    for block_scale in ("fp32", "e8m0"):
        fmt = blocks((1, 128), block_scale)
        alone = torch.stack([fmt.fake_quantize(row) for row in x])
        assert_same_bits(alone, fmt.fake_quantize(x))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block_scale", ["fp32", "e8m0"])
@each_block
def test_compiled_and_not_are_the_same(block, block_scale, rounding, monkeypatch, recwarn):
    fmt, x = blocks(block, block_scale, rounding=rounding), spread(384, 512)
    x[3, 5], x[200, 300], x[130], x[201] = torch.nan, torch.inf, x[130] * 1e-40, 0.0

    def both() -> list[Tensor]:
        q = fmt.quantize(x, torch.Generator().manual_seed(1))
        return [q.dequantize(), q.codes, q.block_scale]

    fast = both()
    assert [str(w.message) for w in recwarn if "uncompiled" in str(w.message)] == []
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    plain = both()
    assert_same_bits(fast[0], plain[0])
    assert torch.equal(fast[1], plain[1])
    assert_same_bits(fast[2], plain[2])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block": [1, 64], "outer_scale": "none"}, r"block=\(1, 64\) is not \[1, 1\] or \[1, 128"),
        ({"block": [1, 128]}, "outer_scale=tensor exclude each other; set outer_scale=none"),
        ({"block": [128, 128], "outer_scale": "row"}, "outer_scale=row exclude each other"),
        ({"block_scale": "e8m0"}, r"block_scale=e8m0 needs a block, \[1, 128\] or \[128, 128\]"),
        ({"block_scale": "e8m0", "outer_scale": "none"}, "block_scale=e8m0 needs a block"),
        ({"block_scale": "ue8m0"}, "block_scale='ue8m0' is not fp32, e8m0; did you mean 'e8m0'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        get_format("fp8_e4m3", **options)


def test_a_list_is_a_block_too():
    fmt = blocks([128, 128], "e8m0")
    assert fmt == blocks((128, 128), "e8m0")
    assert str(fmt) == "fp8_e4m3(block=128x128, outer_scale=none, block_scale=e8m0)"
