"""NVFP4 against Transformer Engine's golden values and torchao, and its own edges.

`data/nvfp4_golden.safetensors` is what Transformer Engine 2.20's PyTorch reference quantizer gives,
dequantized: `CASE/input`, and `CASE/OUTER_SCALE/1x16/four_over_six=MODE`.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from lightning_qrl.formats import get_format

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
    name, outer_scale, _, mode = case.split("/")
    four_over_six = mode.partition("=")[2].lower()
    fmt = get_format("nvfp4", outer_scale=outer_scale, four_over_six=four_over_six)
    x = GOLDEN[f"{name}/input"]
    assert ulps(fmt.fake_quantize(x), GOLDEN[case]) <= 2
    assert ulps(fmt.quantize(x).dequantize(), GOLDEN[case]) <= 2


def test_the_golden_file_is_whole():
    assert len(CASES) == 8 * 2 * 3


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


def torchao(x: torch.Tensor) -> NVFP4Tensor:
    scale = per_tensor_amax_to_scale(x.abs().amax())
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)


def test_torchao_agrees_above_its_floor():
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(11))
    q, theirs = get_format("nvfp4").quantize(x), torchao(x)
    assert q.block_scale.min() > 2.0**-6
    assert torch.equal(q.block_scale, theirs.scale.float().view_as(q.block_scale))
    low, high = theirs.qdata & 15, theirs.qdata >> 4
    assert torch.equal(q.codes, torch.stack([low, high], -1).view_as(q.codes))


def test_torchao_differs_below_its_floor():
    x = torch.full((1, 32), 1e-6)
    x[0, 0] = 1.0
    ours, theirs = get_format("nvfp4").quantize(x), torchao(x)
    assert ours.block_scale[0, 1] == 0.0
    assert theirs.scale.float().flatten()[1] == 2.0**-6


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
