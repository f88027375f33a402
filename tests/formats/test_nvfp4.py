"""NVFP4 against Transformer Engine's golden values and torchao, and its own edges.

`data/nvfp4_golden.safetensors` is what Transformer Engine 2.20's PyTorch reference quantizer gives,
dequantized: `CASE/input`, and `CASE/OUTER_SCALE/BLOCK/four_over_six=MODE`.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from lightning_qrl.formats import Quantized, get_format

GOLDEN = load_file(Path(__file__).parent / "data" / "nvfp4_golden.safetensors")
CASES = sorted(key for key in GOLDEN if not key.endswith("/input"))
MODES = ["none", "mae", "mse"]


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in FP32 steps."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int((ordered(a) - ordered(b)).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str):
    name, outer_scale, block, mode = case.split("/")
    options = {
        "outer_scale": outer_scale,
        "block": [int(size) for size in block.split("x")],
        "four_over_six": mode.partition("=")[2].lower(),
    }
    fmt = get_format("nvfp4", **options)
    x = GOLDEN[f"{name}/input"]
    assert ulps(fmt.fake_quantize(x), GOLDEN[case]) == 0
    assert ulps(fmt.quantize(x).dequantize(), GOLDEN[case]) == 0


def test_the_golden_file_is_whole():
    assert len(CASES) == 8 * 3 * 3  # outer scale and block: tensor 1x16, tensor 16x16, row 1x16


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_and_its_transpose_have_the_same_codes(mode: str):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(4))
    fmt = get_format("nvfp4", block=(16, 16), four_over_six=mode)
    assert torch.equal(fmt.fake_quantize(x.t()), fmt.fake_quantize(x).t())
    assert torch.equal(fmt.quantize(x.t()).block_scale, fmt.quantize(x).block_scale.t())


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_without_an_outer_scale(spread: float):
    # Only scales of E4M3's range fit: the closed form.
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(64, 64, generator=generator) * torch.exp2(
        spread * torch.randn(64, 1, generator=generator)
    )
    q = get_format("nvfp4", outer_scale="none").quantize(x)
    blocks = x.view(64, 4, 16)
    scale = (blocks.abs().amax(-1) / 6).clamp(max=448).numpy().astype(ml_dtypes.float8_e4m3fn)
    scale = torch.from_numpy(scale.astype(np.float32))
    assert q.outer_scale is None
    assert torch.equal(q.block_scale, scale)
    ratio = torch.where(scale[..., None] > 0, blocks * scale.reciprocal()[..., None], 0.0)
    codes = ratio.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(q.dequantize(), (torch.from_numpy(codes) * scale[..., None]).view(64, 64))


def test_without_an_outer_scale_huge_blocks_saturate_and_tiny_ones_vanish():
    x = torch.tensor([[1e30] * 16 + [1e-10] * 16 + [1.0] * 16])
    y = get_format("nvfp4", outer_scale="none").fake_quantize(x)
    assert y[0, 0] == 6 * 448
    assert (y[0, 16:32] == 0).all()
    assert (y[0, 32:] - 1).abs().max() < 0.05


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [16, 40, 256])
def test_a_row_alone_equals_the_row_in_its_batch(mode: str, width: int):
    fmt = get_format("nvfp4", outer_scale="row", four_over_six=mode)
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(width))
    x *= torch.exp2(torch.arange(40.0) - 20)[:, None]
    batch = fmt.fake_quantize(x)
    codes = fmt.quantize(x).codes
    for i in range(40):
        assert torch.equal(fmt.fake_quantize(x[i : i + 1])[0], batch[i])
        assert torch.equal(fmt.quantize(x[i]).codes, codes[i])


def test_a_token_depends_on_no_other_token():
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    louder = torch.stack([x[0], x[1] * 1000])
    per_row, per_tensor = get_format("nvfp4", outer_scale="row"), get_format("nvfp4")
    assert torch.equal(per_row.fake_quantize(x)[0], per_row.fake_quantize(louder)[0])
    assert not torch.equal(per_tensor.fake_quantize(x)[0], per_tensor.fake_quantize(louder)[0])


@pytest.mark.parametrize("mode", ["mae", "mse"])
def test_four_over_six_takes_the_better_scale(mode: str):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(5))
    power = 1 if mode == "mae" else 2

    def error(y: torch.Tensor) -> torch.Tensor:
        return (y - x).abs().pow(power).mean()

    plain = get_format("nvfp4").fake_quantize(x)
    assert error(get_format("nvfp4", four_over_six=mode).fake_quantize(x)) < error(plain)


def test_a_tie_takes_six():
    # A lone value is exact under both scales.
    x = torch.zeros(1, 16)
    x[0, 0] = 6.0
    q = get_format("nvfp4", four_over_six="mae").quantize(x)
    assert q.block_scale.item() == 256.0
    assert q.codes[0, 0].item() == 7


@pytest.mark.parametrize("outer_scale", ["tensor", "row"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("amax", [1e-45, 1e-38, 1e-20, 1.0, 1e20, 3.4e38])
def test_block_scales_are_finite_e4m3(outer_scale: str, mode: str, amax: float):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).clamp(-1, 1) * amax
    x[0, 0], x[1], x[2, :16] = amax, 0.0, 0.0
    q = get_format("nvfp4", outer_scale=outer_scale, four_over_six=mode).quantize(x)
    assert torch.isin(q.block_scale, get_format("fp8_e4m3").codes()).all()
    assert q.dequantize().isfinite().all()


def torchao(x: torch.Tensor, *, two_level: bool = True) -> NVFP4Tensor:
    scale = per_tensor_amax_to_scale(x.abs().amax()) if two_level else None
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)


def assert_equals_torchao(q: Quantized, theirs: NVFP4Tensor) -> None:
    assert torch.equal(q.block_scale, theirs.scale.float().view_as(q.block_scale))
    assert torch.equal(q.scale_codes, theirs.scale.view(torch.uint8).view_as(q.scale_codes))
    assert torch.equal(q.packed, theirs.qdata.view(torch.uint8))
    low, high = theirs.qdata & 15, theirs.qdata >> 4
    assert torch.equal(q.codes, torch.stack([low, high], -1).view_as(q.codes))


def test_torchao_agrees_above_its_floor():
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(11))
    q, theirs = get_format("nvfp4").quantize(x), torchao(x)
    assert q.block_scale.min() > 2.0**-6
    assert_equals_torchao(q, theirs)
    assert ulps(q.dequantize(), theirs.dequantize(torch.float32)) <= 2  # it multiplies scales first


def test_torchao_differs_below_its_floor():
    x = torch.full((1, 32), 1e-6)
    x[0, 0] = 1.0
    ours, theirs = get_format("nvfp4").quantize(x), torchao(x)
    assert ours.block_scale[0, 1] == 0.0
    assert theirs.scale.float().flatten()[1] == 2.0**-6


@pytest.mark.parametrize("two_level", [True, False])
def test_with_its_floor_torchao_agrees_everywhere(two_level: bool):
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(12))
    x *= torch.exp2(-torch.arange(128.0) / 4)[:, None]
    x[3], x[5, 16:48] = 0.0, 0.0
    outer_scale = "tensor" if two_level else "none"
    fmt = get_format("nvfp4", outer_scale=outer_scale, scale_floor=2.0**-6)
    q = fmt.quantize(x)
    assert (q.block_scale == 2.0**-6).any()
    assert (q.block_scale > 2.0**-6).any()
    assert_equals_torchao(q, torchao(x, two_level=two_level))


def test_the_floor_bounds_every_block_scale():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    x[1:] *= 1e-9
    for floor in (2.0**-9, 2.0**-6, 1.0):
        for mode in MODES:
            q = get_format("nvfp4", scale_floor=floor, four_over_six=mode).quantize(x)
            assert q.block_scale.min() == floor


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(["tensor", "row"]),
    st.sampled_from(MODES),
)
@settings(max_examples=150, deadline=None)
def test_any_finite_input(values: list[float], outer_scale: str, mode: str):
    fmt = get_format("nvfp4", outer_scale=outer_scale, four_over_six=mode)
    x = torch.tensor(values)
    y = fmt.fake_quantize(x)
    assert y.isfinite().all()
    assert torch.equal(fmt.quantize(x).dequantize(), y)
    assert (y * x >= 0).all()
