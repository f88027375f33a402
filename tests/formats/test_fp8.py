"""FP8 with an outer scale: the equation, row independence, and the edges of amax."""

import ml_dtypes
import numpy as np
import pytest
import torch

from lightning_qrl.formats import get_format


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("outer_scale", ["tensor", "row"])
def test_the_equation(outer_scale: str):
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)) * 37
    s = get_format("fp8_e4m3", outer_scale=outer_scale).scaled(x)
    amax = x.abs().amax() if outer_scale == "tensor" else x.abs().amax(-1, keepdim=True)
    assert torch.equal(s.outer, amax / 448)
    assert torch.equal(s.values, e4m3((x / (amax / 448)).clamp(-448, 448)))


def test_without_a_scale_x_itself_is_rounded():
    x = torch.tensor([[0.001, 1.06, 300.0, 1e4, float("-inf"), float("nan")]])
    s = get_format("fp8_e4m3", outer_scale="none").scaled(x)
    assert s.outer is None
    assert torch.equal(s.values[:, :5], e4m3(x.clamp(-448, 448))[:, :5])
    assert s.values[0, 5].isnan()


def test_a_row_alone_equals_the_row_in_its_batch():
    fmt = get_format("fp8_e4m3", outer_scale="row")
    x = torch.randn(6, 77, generator=torch.Generator().manual_seed(1))
    x[2] *= 1e6
    for i in range(6):
        assert torch.equal(fmt.fake_quantize(x[i : i + 1])[0], fmt.fake_quantize(x)[i])
        assert torch.equal(fmt.fake_quantize(x[i]), fmt.fake_quantize(x)[i])


@pytest.mark.parametrize("outer_scale", ["tensor", "row", "none"])
def test_a_nan_poisons_itself_only(outer_scale: str):
    fmt = get_format("fp8_e4m3", outer_scale=outer_scale)
    x = torch.randn(3, 20)
    x[1, 4] = float("nan")
    y, q = fmt.fake_quantize(x), fmt.quantize(x)
    assert y.isnan().sum() == 1
    assert q.codes[1, 4] % 128 == 0x7F
    assert torch.equal(y[~x.isnan()], fmt.fake_quantize(x.nan_to_num())[~x.isnan()])


def test_the_scale_is_never_subnormal():
    fmt = get_format("fp8_e4m3", outer_scale="row")
    s = fmt.scaled(torch.tensor([[0.0], [1e-45], [1e-38], [3.4e38]]))
    assert (s.outer >= 2.0**-126).all()
    assert s.product().isfinite().all()


def test_the_largest_fp32_stays_finite():
    x = torch.full((2, 4), torch.finfo(torch.float32).max)
    assert torch.equal(get_format("fp8_e4m3").scaled(x).values, torch.full((2, 4), 448.0))
    assert get_format("fp8_e4m3").fake_quantize(x).isfinite().all()
