"""MX formats against torchao's `to_mx`, all four scale rules, and the ends of E8M0."""

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from lightning_qrl.formats import get_format

RULES = ["floor", "ceil", "rceil", "even"]


def torchao(x: torch.Tensor, rule: str) -> MXTensor:
    mode = ScaleCalculationMode[rule.upper()]
    return MXTensor.to_mx(x, torch.float8_e4m3fn, 32, mode)


def assert_equals_torchao(x: torch.Tensor, rule: str) -> None:
    q, theirs = get_format("mxfp8", scale_rule=rule).quantize(x), torchao(x, rule)
    scale_field = q.block_scale.view(torch.int32) >> 23  # a subnormal 2^-127 has field 0, as E8M0
    assert torch.equal(scale_field.to(torch.uint8), theirs.scale.view(torch.uint8))
    assert torch.equal(q.codes, theirs.qdata.view(torch.uint8))
    assert torch.equal(q.dequantize(), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 20.0])
def test_codes_and_scales_are_torchaos(rule: str, spread: float):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 256, generator=generator)
    assert_equals_torchao(x * torch.exp2(spread * torch.randn(64, 256, generator=generator)), rule)


@pytest.mark.parametrize("rule", RULES)
def test_bf16_and_zero_blocks(rule: str):
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[2] = 0.0
    x[3, 32:64] = -0.0
    assert_equals_torchao(x.float(), rule)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
def test_every_mantissa_step_of_amax(rule: str):
    # The top of a block at every BF16 mantissa, and one FP32 ulp to either side.
    mantissas = torch.arange(0x3F800000, 0x40000000, 0x10000, dtype=torch.int32)
    amax = torch.cat([mantissas, mantissas - 1, mantissas + 1]).view(torch.float32)
    x = torch.rand(amax.numel(), 32, generator=torch.Generator().manual_seed(0))
    x[:, 5] = amax
    for exponent in (-100, -3, 0, 60, 120):
        assert_equals_torchao(x * 2.0**exponent, rule)


def test_rceil_is_exact_where_torchao_takes_a_rounded_log2():
    fmt = get_format("mxfp8", scale_rule="rceil")
    step = torch.full((1, 32), 448.0 * 2**-40)
    above = torch.nextafter(step, torch.tensor(1.0))
    assert fmt.quantize(step).block_scale.item() == 2.0**-40
    assert fmt.quantize(above).block_scale.item() == 2.0**-39
    assert torchao(above, "rceil").scale.float().item() == 2.0**-40


@pytest.mark.parametrize("rule", RULES)
def test_scales_stay_where_e8m0_and_fp32_are(rule: str):
    fmt = get_format("mxfp8", scale_rule=rule)
    for amax in (0.0, 1e-45, 1e-40, 2.0**-119, 1.0, 1.7e38, 3.4e38):
        q = fmt.quantize(torch.full((1, 32), amax))
        assert 2.0**-127 <= q.block_scale.item() <= 2.0**119
        assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_tiny_blocks_divide_by_the_scale_they_store(rule: str):
    x = torch.tensor([[k * 2.0**-127 for k in range(17)] + [0.0] * 15])
    q = get_format("mxfp8", scale_rule=rule).quantize(x)
    assert q.block_scale.item() == 2.0**-127
    assert torch.equal(q.dequantize(), x)


def test_a_nan_scale_marks_the_block():
    x = torch.ones(2, 64)
    x[0, 3] = float("nan")
    q = get_format("mxfp8").quantize(x)
    assert q.block_scale.isnan().tolist() == [[True, False], [False, False]]
