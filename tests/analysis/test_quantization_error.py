"""Quantization error: the decomposition is exact, and the published numbers come out."""

import math

import numpy as np
import pytest
import torch

from lightning_qrl.analysis.quantization_error import (
    QuantizationError,
    pool,
    quantization_error,
    weight_error,
)
from lightning_qrl.formats import get_format

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
FORMATS = [
    ("mxfp4", {"scale_rule": "rceil"}),
    ("mxfp4", {"scale_rule": "floor"}),
    ("mxfp6_e2m3", {"scale_rule": "even"}),
    ("mxfp8", {"scale_rule": "ceil"}),
    ("nvfp4", {}),
    ("nvfp4", {"outer_scale": "row", "four_over_six": "mae"}),
    ("nvfp4", {"outer_scale": "none"}),
    ("nvfp4", {"block": (16, 16)}),
    ("nvfp4", {"hadamard": 16}),
    ("nvfp4", {"rounding": "stochastic"}),
    ("fp8_e4m3", {"outer_scale": "row"}),
    ("fp8_e5m2", {"outer_scale": "none"}),
    ("fp8_e4m3", {"outer_scale": "none", "block": (1, 128)}),
    ("fp8_e4m3", {"outer_scale": "none", "block": (128, 128), "block_scale": "e8m0"}),
    ("e3m2", {}),
    ("int8", {}),
    ("int4", {}),
    ("int2", {}),
    ("bf16", {}),
    ("fp16", {}),
]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the identity -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 96), (3, 20, 50), (37,), (1, 1), (2, 1, 17)], ids=str)
@pytest.mark.parametrize(("name", "options"), FORMATS, ids=str)
def test_the_parts_sum_to_the_error(name, options, shape):
    x = gaussian(*shape) * gaussian(*shape, seed=1).exp()
    found = quantization_error(x, get_format(name, **options), torch.Generator().manual_seed(0))
    assert found.elements >= x.numel()
    parts = found.scale + found.deadzone + found.grid
    parts += found.scale_deadzone + found.scale_grid + found.deadzone_grid
    assert parts == pytest.approx(found.error, rel=1e-12, abs=1e-300)
    assert found.deadzone_grid == 0
    assert sum(found.shares.values()) == pytest.approx(1 if found.error else 0, rel=1e-12)


@pytest.mark.parametrize(("name", "options"), FORMATS, ids=str)
def test_the_error_is_that_of_the_quantized_tensor(name, options):
    x = gaussian(48, 80).to(torch.bfloat16)
    format, seed = get_format(name, **options), torch.Generator
    found = quantization_error(x, format, seed().manual_seed(3))
    q = format.fake_quantize(x.float(), seed().manual_seed(3)).double()
    exact = x.double()
    # A rotation keeps lengths, to FP32's rounding.
    rel = 1e-5 if options.get("hadamard") else 1e-12
    assert found.error == pytest.approx(float((q - exact).square().sum()), rel=rel)
    assert found.signal == pytest.approx(float(exact.square().sum()), rel=rel)
    assert found.product == pytest.approx(float((q * exact).sum()), rel=rel)
    ratio = float((q - exact).norm() / exact.norm())
    assert found.relative_error == pytest.approx(ratio, rel=rel)
    assert found.sqnr_db == pytest.approx(math.inf if not ratio else -20 * math.log10(ratio))


def by_hand(x: np.ndarray) -> dict[str, float]:
    """The definitions, element by element, for blocks of 32 E2M1 values under a scale 2^ceil."""
    sums = dict.fromkeys(("scale", "deadzone", "grid", "scale_grid", "scale_deadzone"), 0.0)
    sums |= {"in_deadzone": 0, "underflowed": 0}

    def rounded(value: float) -> float:
        gaps = [abs(abs(value) - code) for code in E2M1]
        near = [i for i, gap in enumerate(gaps) if gap == min(gaps)]
        return math.copysign(E2M1[next(i for i in near if len(near) == 1 or i % 2 == 0)], value)

    for block in x.reshape(-1, 32).tolist():
        ideal = max(map(abs, block)) / 6
        used = 2.0 ** math.ceil(math.log2(ideal))
        for value in block:
            q, best = used * rounded(value / used), ideal * rounded(value / ideal)
            scale, rest = q - best, best - value
            where = "deadzone" if best == 0 else "grid"
            sums["scale"] += scale**2
            sums[where] += rest**2
            sums[f"scale_{where}"] += 2 * scale * rest
            sums["in_deadzone"] += best == 0 and value != 0
            sums["underflowed"] += q == 0 and value != 0
    return sums


def test_the_parts_are_those_of_the_definition():
    x = gaussian(8, 128)
    x[0, :4] = torch.tensor([3.0, 3.0 / 24, -3.0 / 24 * 1.01, 0.0])  # amax, a tie, just above, zero
    x[0, 4:32] = x[0, 4:32].clamp(-2, 2)
    found = quantization_error(x, get_format("mxfp4", scale_rule="rceil"))
    for name, value in by_hand(x.double().numpy()).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name


# --- published numbers --------------------------------------------------------------------------


def test_the_shares_on_gaussian_blocks():
    found = quantization_error(gaussian(4096, 512), get_format("mxfp4", scale_rule="rceil"))
    shares = found.shares
    assert shares["scale"] == pytest.approx(1.773, abs=0.006)
    assert shares["deadzone"] == pytest.approx(0.0205, abs=0.0003)
    assert shares["grid"] == pytest.approx(0.747, abs=0.006)
    assert shares["scale_deadzone"] == 0
    assert found.scale_grid_cosine == pytest.approx(-0.669, abs=0.002)
    assert found.fraction("in_deadzone") == pytest.approx(0.0775, abs=0.0005)
    assert found.fraction("underflowed") == pytest.approx(0.107, abs=0.001)
    assert found.mean_scale_gain == pytest.approx(1.389, abs=0.004)
    assert found.gain == pytest.approx(0.990, abs=0.0005)
    ideal = (found.deadzone + found.grid) / found.signal
    assert ideal == pytest.approx(0.0102, abs=0.0001)


@pytest.mark.parametrize(
    ("name", "options", "relative_mse", "saturated"),
    [
        ("mxfp4", {"scale_rule": "rceil"}, 0.0133, 0),
        ("mxfp4", {"scale_rule": "floor"}, 0.0132, 0.023),
        ("mxfp4", {"scale_rule": "even"}, 0.0125, 0.006),
        ("nvfp4", {}, 0.0090, 0.035),
    ],
    ids=str,
)
def test_the_error_on_gaussian_blocks(name, options, relative_mse, saturated):
    found = quantization_error(gaussian(2048, 512), get_format(name, **options))
    assert found.relative_mse == pytest.approx(relative_mse, abs=0.0001)
    assert found.fraction("saturated") == pytest.approx(saturated, abs=0.001)


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), FORMATS, ids=str)
def test_zeros_and_nothing(name, options):
    format = get_format(name, **options)
    zeros = quantization_error(torch.zeros(4, 32), format)
    assert (zeros.error, zeros.signal, zeros.skipped) == (0, 0, 0)
    assert (zeros.underflowed, zeros.in_deadzone, zeros.saturated) == (0, 0, 0)
    assert (zeros.relative_error, zeros.sqnr_db, zeros.gain) == (0, math.inf, 1)
    assert set(zeros.shares.values()) == {0}
    for shape in ((0,), (0, 32), (4, 0)):
        assert quantization_error(torch.zeros(shape), format) == QuantizationError()


def test_what_is_not_finite_is_counted_and_left_out():
    x = gaussian(4, 64)
    format = get_format("mxfp4")
    clean = pool([quantization_error(x[1:], format), quantization_error(x[0, 32:], format)])
    x[0, 3] = math.nan
    poisoned = quantization_error(x, format)
    assert (poisoned.skipped, poisoned.elements) == (32, 4 * 64 - 32)
    assert poisoned.error == pytest.approx(clean.error, rel=1e-12)
    x[0, 3] = math.inf
    infinite = quantization_error(x, format)
    assert (infinite.skipped, infinite.elements) == (1, 4 * 64 - 1)
    assert math.isfinite(infinite.error)


def test_a_large_tensor_is_measured_in_pieces(monkeypatch):
    import lightning_qrl.analysis.quantization_error as module

    x = gaussian(3, 70, 48)
    for options in ({}, {"block": (16, 16)}, {"outer_scale": "row"}):
        format = get_format("nvfp4", **options)
        monkeypatch.setattr(module, "PIECE", 1 << 20)
        whole = quantization_error(x, format)
        monkeypatch.setattr(module, "PIECE", 500)
        parts = quantization_error(x, format)
        for name in QuantizationError.__slots__:
            assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12), name


def test_layout_and_dtype_do_not_matter():
    x = gaussian(64, 32).to(torch.bfloat16)
    format = get_format("nvfp4", four_over_six="mse")
    assert quantization_error(x.T, format) == quantization_error(x.T.contiguous().float(), format)


def test_each_expert_has_scales_of_its_own():
    weight = gaussian(4, 16, 32) * torch.tensor([1.0, 10.0, 100.0, 1000.0])[:, None, None]
    format = get_format("fp8_e4m3")
    each = [quantization_error(expert, format) for expert in weight]
    assert weight_error(weight, format) == pool(each)
    assert weight_error(weight[0], format) == each[0]
    assert weight_error(weight, format) != quantization_error(weight, format)
