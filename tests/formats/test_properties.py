"""Properties over arbitrary input: idempotent, monotone, equivariant, nearest, row by row.

A scale is derived from values that it has rounded already when a format is applied twice:

* Bit for bit the same again: BF16, FP16, MX by every rule (a power of two that takes the largest
  code to a code), groups of integers (BF16 scales, whose products FP32 holds), and all without any
  scale.
* The same codes, and values to an ulp or two: one FP32 outer scale, since amax / largest * largest
  is not always amax. NVFP4 too, where block scales are normal E4M3 numbers: a subnormal one has so
  few bits that the largest element need not come out as 6, and the next scale differs.
* Neither: Hadamard (the rotation there and back rounds, and an amax just below a power of two
  halves an MX scale), and so it is not tested.

Amax beyond the range of the strategies (1e-45 to 3e38) is in `test_every_format`.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from lightning_qrl.formats import Format, get_format

settings.register_profile("formats", deadline=None, derandomize=True, max_examples=10)
PROFILE = settings.get_profile("formats")

NONE = {"outer_scale": "none"}
ROW = {"outer_scale": "row"}
GROUPS = {**NONE, "block": (1, 8)}
RULES = ("floor", "ceil", "rceil", "even")

HALVES = [get_format("bf16"), get_format("fp16")]
MX = [get_format(name, scale_rule=rule) for name in ("mxfp8", "mxfp4") for rule in RULES]
MX += [get_format(name) for name in ("mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3")]
INT_GROUPS = [get_format(f"int{bits}", **GROUPS) for bits in (2, 4, 8)]
UNSCALED = [get_format(name, **NONE) for name in ("fp8_e4m3", "fp8_e5m2", "e3m2", "e1m2", "int8")]
OUTER = [
    get_format(name, outer_scale=outer)
    for name in ("fp8_e4m3", "fp8_e5m2", "e3m0", "int8")
    for outer in ("tensor", "row")
]
NVFP4 = [
    get_format("nvfp4", outer_scale=outer, four_over_six=mode)
    for outer in ("tensor", "row", "none")
    for mode in ("none", "mae", "mse")
]
NVFP4 += [get_format("nvfp4", scale_floor=2.0**-6), get_format("nvfp4", block=(16, 16))]
TENSOR_OR_ROW = [f for f in NVFP4 if "outer_scale=none" not in str(f)]
EVERY = [*HALVES, *MX, *INT_GROUPS, *UNSCALED, *OUTER, *NVFP4]
BY_ROW = [f for f in EVERY if getattr(f, "outer_scale", "none") != "tensor"]

every = pytest.mark.parametrize("fmt", EVERY, ids=str)


def tensors(least: int = -(2**20), *, rows: int = 3, length: int = 36) -> st.SearchStrategy[Tensor]:
    """FP32 [R, n] of multiples of 2^-10, up to 1024; of few values, so that many are equal."""
    shapes = st.tuples(st.integers(1, rows), st.integers(1, length))
    elements = st.integers(least, 2**20)
    arrays = hnp.arrays(np.int32, shapes, elements=elements, fill=elements)
    return arrays.map(lambda array: torch.from_numpy(array).float() / 2**10)


def parts(fmt: Format, x: Tensor) -> tuple[Tensor, Tensor]:
    """Elements and what each is multiplied with, float64."""
    q = fmt.quantize(x)
    elements = q.layout.element.decode(q.codes).double()
    scale = torch.ones_like(elements)
    if q.block_scale is not None:
        rows, size = q.layout.block
        blocks = q.block_scale.double().repeat_interleave(rows, 0).repeat_interleave(size, 1)
        scale = blocks[: x.shape[0], : x.shape[1]]
    return elements, scale if q.outer_scale is None else scale * q.outer_scale.double()


@pytest.mark.parametrize("fmt", [*HALVES, *MX, *INT_GROUPS, *UNSCALED], ids=str)
@given(x=tensors())
@settings(PROFILE)
def test_idempotent_bit_for_bit(fmt: Format, x: Tensor):
    once = fmt.fake_quantize(x)
    assert torch.equal(fmt.fake_quantize(once), once)


@pytest.mark.parametrize("fmt", [*OUTER, *NVFP4], ids=str)
@given(x=tensors(2**12))  # 4 to 1024: all block scales are normal
@settings(PROFILE)
def test_idempotent_to_an_ulp_or_two(fmt: Format, x: Tensor):
    once = fmt.fake_quantize(x)
    torch.testing.assert_close(fmt.fake_quantize(once), once, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "e3m2"])
@given(x=tensors())
@settings(PROFILE)
def test_stochastic_rounding_leaves_what_is_representable(name: str, x: Tensor):
    fmt = get_format(name, rounding="stochastic", **(NONE if name == "e3m2" else {}))
    once = fmt.fake_quantize(x)
    assert torch.equal(fmt.fake_quantize(once), once)


@every
@given(x=tensors(rows=1, length=16))
@settings(PROFILE)
def test_monotone_inside_a_block(fmt: Format, x: Tensor):
    if fmt.name.startswith("int"):
        x = x[:, :8]
    x = x.sort(-1).values
    assert (fmt.fake_quantize(x).diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("fmt", [*HALVES, *MX, *INT_GROUPS, *OUTER, *TENSOR_OR_ROW], ids=str)
@given(x=tensors(2**8), exponent=st.integers(-7, 5))
@settings(PROFILE)
def test_scaling_by_a_power_of_two_scales_the_result(fmt: Format, x: Tensor, exponent: int):
    x = x * torch.where(torch.arange(x.shape[1]) % 2 == 0, 1.0, -1.0)
    factor = 2.0**exponent
    assert torch.equal(fmt.fake_quantize(x * factor), fmt.fake_quantize(x) * factor)


@pytest.mark.parametrize("fmt", [f for f in EVERY if f.bits < 16], ids=str)
@given(x=tensors())
@settings(PROFILE)
def test_each_value_is_the_nearest_under_its_scale(fmt: Format, x: Tensor):
    elements, scale = parts(fmt, x)
    codes = fmt.codes().double()
    ratio = (x.double() / scale).where(scale > 0, 0.0).clamp(codes[0], codes[-1])
    distance = (ratio[..., None] - codes).abs().amin(-1)
    # Dividing by the scale rounds once or twice: a value that near to a midpoint may go either way.
    assert ((ratio - elements).abs() <= distance + 4e-7 * ratio.abs()).all()


@pytest.mark.parametrize("fmt", [f for f in EVERY if f.bits < 16], ids=str)
@given(x=tensors())
@settings(PROFILE)
def test_the_error_is_at_most_half_a_gap(fmt: Format, x: Tensor):
    elements, scale = parts(fmt, x)
    codes = fmt.codes().double()
    inside = (x.double().abs() <= codes[-1] * scale) & (scale > 0)
    place = torch.searchsorted(codes, (x.double() / scale).where(inside, 0.0))
    place = place.clamp(1, len(codes) - 1)
    gap = (codes[place] - codes[place - 1]) * scale
    error = (fmt.fake_quantize(x).double() - x.double()).abs()
    assert (error <= gap / 2 + 1e-6 * x.double().abs())[inside].all()


@pytest.mark.parametrize("fmt", BY_ROW, ids=str)
@given(x=tensors(rows=4), exponents=st.lists(st.integers(-12, 6), min_size=4, max_size=4))
@settings(PROFILE)
def test_a_row_alone_equals_the_row_in_its_batch(fmt: Format, x: Tensor, exponents: list[int]):
    x = x * torch.exp2(torch.tensor(exponents[: len(x)]).float())[:, None]
    batch, q = fmt.fake_quantize(x), fmt.quantize(x)
    for i in range(len(x)):
        assert torch.equal(fmt.fake_quantize(x[i : i + 1])[0], batch[i])
        assert torch.equal(fmt.fake_quantize(x[i]), batch[i])
        assert torch.equal(fmt.quantize(x[i]).packed, q.packed[i])


@pytest.mark.parametrize("mode", ["mae", "mse"])
@pytest.mark.parametrize("outer_scale", ["tensor", "row", "none"])
@given(x=tensors(length=48))
@settings(PROFILE)
def test_four_over_six_is_never_worse_than_six(mode: str, outer_scale: str, x: Tensor):
    # Against mapping to 6 under the same bound: 256.
    fmt = get_format("nvfp4", outer_scale=outer_scale, four_over_six=mode)
    amax = x.abs().amax() if outer_scale == "tensor" else x.abs().amax(-1, keepdim=True)
    assume((amax > 1e-3).all())
    outer = torch.ones_like(amax) if outer_scale == "none" else amax / (6 * 256)
    length = -x.shape[1] % 16
    blocks = torch.nn.functional.pad(x, (0, length)).view(len(x), -1, 16)
    units = outer if outer_scale == "tensor" else outer[..., None]
    ideal = blocks.abs().amax(-1) / 6 / (units if units.ndim == 0 else units[..., 0])
    fp8 = get_format("fp8_e4m3", outer_scale="none")
    scale = (fp8.fake_quantize(ideal)[..., None] * units).double()
    e2m1 = get_format("e2m1", outer_scale="none")
    ratio = (blocks.double() / scale).where(scale > 0, 0.0)
    six = e2m1.fake_quantize(ratio.float()).double() * scale
    ours = torch.nn.functional.pad(fmt.fake_quantize(x), (0, length)).view_as(blocks).double()
    power = 1 if mode == "mae" else 2
    error = [(y - blocks.double()).abs().pow(power).sum(-1) for y in (ours, six)]
    assert (error[0] <= error[1] * (1 + 1e-5) + 1e-9 * blocks.abs().amax(-1)).all()
