"""Small floats under an outer scale: the equation, row independence, and the edges of amax."""

import ml_dtypes
import numpy as np
import pytest
import torch

from lightning_qrl.formats import get_format


def e4m3(x: torch.Tensor, oracle: type = ml_dtypes.float8_e4m3fn) -> torch.Tensor:
    return torch.from_numpy(x.numpy().astype(oracle).astype(np.float32))


@pytest.mark.parametrize("outer_scale", ["tensor", "row"])
@pytest.mark.parametrize(
    ("name", "largest", "oracle"),
    [
        ("fp8_e4m3", 448, ml_dtypes.float8_e4m3fn),
        ("fp8_e5m2", 57344, ml_dtypes.float8_e5m2),
        ("e3m2", 28, ml_dtypes.float6_e3m2fn),
        ("e2m3", 7.5, ml_dtypes.float6_e2m3fn),
        ("e2m1", 6, ml_dtypes.float4_e2m1fn),
    ],
)
def test_the_equation(name: str, largest: float, oracle: type, outer_scale: str):
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)) * 37
    s = get_format(name, outer_scale=outer_scale).scaled(x)
    amax = x.abs().amax() if outer_scale == "tensor" else x.abs().amax(-1, keepdim=True)
    assert torch.equal(s.outer, amax / largest)
    assert torch.equal(s.values, e4m3((x / (amax / largest)).clamp(-largest, largest), oracle))


def test_torchs_own_fp8_has_the_same_bytes():
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(1))
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        q = get_format(name).quantize(x)
        assert torch.equal(q.codes, (x / q.outer_scale).to(dtype).view(torch.uint8))


@pytest.mark.parametrize("name", ["e3m2", "e2m1", "e1m6"])
def test_elements_without_nan_poison_their_scale(name: str):
    x = torch.randn(3, 20)
    x[1, 4] = float("nan")
    assert get_format(name, outer_scale="tensor").fake_quantize(x).isnan().all()
    rows = get_format(name, outer_scale="row").fake_quantize(x)
    assert rows.isnan().all(-1).tolist() == [False, True, False]
    assert not rows[[0, 2]].isnan().any()
    assert get_format(name, outer_scale="none").quantize(x).codes[1, 4] == 0


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
