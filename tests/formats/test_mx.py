"""MX formats against torchao's `to_mx`, all elements and scale rules, and the ends of E8M0.

Where torchao differs, on purpose (see `formats/mx.py`): blocks whose scale is 2^-127, blocks at
FP32's upper end, the last ulps above a step of `rceil`.
"""

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from lightning_qrl.formats import get_format

RULES = ["floor", "ceil", "rceil", "even"]
ELEMENTS = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e3m2": DTYPE_FP6_E3M2,
    "mxfp6_e2m3": DTYPE_FP6_E2M3,
    "mxfp4": torch.float4_e2m1fn_x2,
}


def torchao(x: torch.Tensor, rule: str, name: str = "mxfp8") -> MXTensor:
    mode = ScaleCalculationMode[rule.upper()]
    return MXTensor.to_mx(x, ELEMENTS[name], 32, mode)


def assert_equals_torchao(x: torch.Tensor, rule: str, name: str = "mxfp8") -> None:
    q, theirs = get_format(name, scale_rule=rule).quantize(x), torchao(x, rule, name)
    scale_field = q.block_scale.view(torch.int32) >> 23  # a subnormal 2^-127 has field 0, as E8M0
    assert torch.equal(scale_field.to(torch.uint8), theirs.scale.view(torch.uint8))
    assert torch.equal(q.scale_codes, theirs.scale.view(torch.uint8))
    stored = q.packed if q.layout.element.bits == 4 else q.codes  # torchao packs no 6-bit codes
    assert torch.equal(stored, theirs.qdata.view(torch.uint8))
    assert torch.equal(q.dequantize(), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 20.0])
def test_codes_and_scales_are_torchaos(name: str, rule: str, spread: float):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 256, generator=generator)
    wide = x * torch.exp2(spread * torch.randn(64, 256, generator=generator))
    assert_equals_torchao(wide, rule, name)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_bf16_and_zero_blocks(name: str, rule: str):
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[2] = 0.0
    x[3, 32:64] = -0.0
    assert_equals_torchao(x.float(), rule, name)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
def test_every_mantissa_step_of_amax(name: str, rule: str):
    # The top of a block at every BF16 mantissa, and one FP32 ulp to either side.
    mantissas = torch.arange(0x3F800000, 0x40000000, 0x10000, dtype=torch.int32)
    amax = torch.cat([mantissas, mantissas - 1, mantissas + 1]).view(torch.float32)
    x = torch.rand(amax.numel(), 32, generator=torch.Generator().manual_seed(0))
    x[:, 5] = amax
    for exponent in (-100, -3, 0, 60, 110 if name == "mxfp8_e5m2" else 120):
        assert_equals_torchao(x * 2.0**exponent, rule, name)


@pytest.mark.parametrize("name", ELEMENTS)
def test_rceil_is_the_least_scale_that_saturates_nothing(name: str):
    fmt = get_format(name, scale_rule="rceil")
    largest = fmt.element.largest
    mantissas = torch.arange(0x3F800000, 0x40000000, 0x4000, dtype=torch.int32)
    step = torch.tensor(largest)
    inf = torch.tensor(float("inf"))
    near = torch.stack([step, torch.nextafter(step, inf), torch.nextafter(step, -inf)])
    amax = torch.cat([mantissas.view(torch.float32), near])
    for exponent in (-60, 0, 60):
        x = torch.zeros(len(amax), 32)
        x[:, 3] = amax * 2.0**exponent
        scale = fmt.quantize(x).block_scale[:, 0].double()
        assert torch.equal(scale.log2(), scale.log2().round())
        assert (x[:, 3].double() <= scale * largest).all()
        assert (x[:, 3].double() > scale / 2 * largest).all()


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_square_block_has_the_scale_of_its_amax(name: str, rule: str):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(9))
    x *= torch.exp2(torch.arange(64.0) - 32)[:, None]
    square = get_format(name, scale_rule=rule, block=(32, 32))
    q = square.quantize(x)
    assert q.block_scale.shape == (2, 3)
    # A row of the block's amax everywhere has the same scale, by the rule that torchao agrees with.
    amax = x.abs().unflatten(0, (2, 32)).unflatten(2, (3, 32)).amax((1, 3))
    flat = amax[..., None].expand(2, 3, 32).reshape(2, 96)
    assert torch.equal(get_format(name, scale_rule=rule).quantize(flat).block_scale, q.block_scale)
    assert torch.equal(square.fake_quantize(x.t()), square.fake_quantize(x).t())


def test_rceil_is_exact_where_torchao_takes_a_rounded_log2():
    fmt = get_format("mxfp8", scale_rule="rceil")
    step = torch.full((1, 32), 448.0 * 2**-40)
    above = torch.nextafter(step, torch.tensor(1.0))
    assert fmt.quantize(step).block_scale.item() == 2.0**-40
    assert fmt.quantize(above).block_scale.item() == 2.0**-39
    assert torchao(above, "rceil").scale.float().item() == 2.0**-40


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_scales_stay_where_e8m0_and_fp32_are(name: str, rule: str):
    fmt = get_format(name, scale_rule=rule)
    for amax in (0.0, 1e-45, 1e-40, 2.0**-119, 1.0, 1.7e38, 3.4e38):
        q = fmt.quantize(torch.full((1, 32), amax))
        assert 2.0**-127 <= q.block_scale.item() <= 2.0 ** (127 - fmt.element.emax)
        assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_tiny_blocks_divide_by_the_scale_they_store(rule: str):
    x = torch.tensor([[k * 2.0**-127 for k in range(17)] + [0.0] * 15])
    q = get_format("mxfp8", scale_rule=rule).quantize(x)
    assert q.block_scale.item() == 2.0**-127
    assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_nan_scale_marks_the_block(name: str, rule: str):
    x = torch.ones(2, 64)
    x[0, 3] = float("nan")
    q = get_format(name, scale_rule=rule).quantize(x)
    assert q.block_scale.isnan().tolist() == [[True, False], [False, False]]
    assert (q.scale_codes == 255).tolist() == [[True, False], [False, False]]
    assert (torchao(x, rule, name).scale.view(torch.uint8) == 255).tolist() == [
        [True, False],
        [False, False],
    ]
