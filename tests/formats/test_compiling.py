"""Compiled kernels: the same bits as the plain functions, and what happens without a compiler.

The other tests run uncompiled (see `tests/conftest.py`). Each kernel here takes seconds.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_qrl.formats import Format, compiling, get_format
from lightning_qrl.formats.compiling import ENOUGH, WORTHWHILE, compiled

FAST = [
    get_format("nvfp4", outer_scale="row", four_over_six="mae"),
    get_format("mxfp8"),
]
NVFP4 = [
    get_format("nvfp4", outer_scale=outer, four_over_six=mode)
    for outer in ("tensor", "row", "none")
    for mode in ("none", "mae", "mse")
]
SLOW = [
    *NVFP4,
    get_format("nvfp4", block=(16, 16), four_over_six="mse"),
    get_format("nvfp4", block=(16, 16)),
    get_format("nvfp4", rounding="stochastic", hadamard=16, scale_floor=2.0**-6),
    *(get_format("mxfp4", scale_rule=rule) for rule in ("floor", "ceil", "rceil", "even")),
    get_format("mxfp8_e5m2", block=(32, 32)),
    get_format("mxfp6_e3m2", rounding="stochastic"),
    get_format("mxfp6_e2m3", hadamard=32),
    *(get_format("fp8_e4m3", outer_scale=outer) for outer in ("tensor", "row", "none")),
    get_format("fp8_e5m2", rounding="stochastic"),
    get_format("e2m1"),
    get_format("e5m0"),
    get_format("int8"),
    get_format("int4", outer_scale="none", block=(1, 32)),
    get_format("int3", rounding="stochastic", outer_scale="tensor"),
]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilation, turned on again."""
    import torch._dynamo

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setattr(compiling, "_failed", set())
    with torch._dynamo.config.patch(disable=False):
        yield


def wide(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.exp2(4 * torch.randn(rows, 1, generator=generator))


def everything(fmt: Format, x: Tensor) -> list[Tensor]:
    def g() -> torch.Generator:
        return torch.Generator().manual_seed(1)

    s, q = fmt.scaled(x, g()), fmt.quantize(x, g())
    scales = (s.outer, q.scale_codes)
    return [s.values, q.packed, q.dequantize(), *(t for t in scales if t is not None)]


def same(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num().view(bits), b.nan_to_num().view(bits)
    )


def assert_compiled_is_eager(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(512, 192), (64, 1024), (1024, 96), (3, 96, 320)]
    inputs = [wide(s[0], s[1], i) for i, s in enumerate(shapes[:3])]
    inputs.append(wide(288, 320, 3).view(3, 96, 320))
    strange = wide(512, 192, 9)
    strange[3, 5], strange[100, 7], strange[200, 0] = torch.nan, torch.inf, -torch.inf
    strange[300], strange[301], strange[302, :32] = 0.0, strange[301] * 1e-44, -0.0
    inputs.append(strange)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kernel that is dropped warns
        fast = [everything(fmt, x) for x in inputs]
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    for x, results in zip(inputs, fast, strict=True):
        assert all(map(same, results, everything(fmt, x)))


@pytest.mark.parametrize("fmt", FAST, ids=str)
def test_compiled_equals_eager(fmt: Format, compiler: None, monkeypatch: pytest.MonkeyPatch):
    from torch._dynamo.utils import counters

    counters.clear()
    assert_compiled_is_eager(fmt, monkeypatch)
    # One graph for `scaled` and one for `quantize`'s codes serve every size.
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("fmt", SLOW, ids=str)
def test_every_kernel_equals_eager(fmt: Format, compiler: None, monkeypatch: pytest.MonkeyPatch):
    assert_compiled_is_eager(fmt, monkeypatch)


def test_small_tensors_are_not_compiled(compiler: None):
    from torch._dynamo.utils import counters

    counters.clear()
    get_format("nvfp4", scale_floor=0.125).fake_quantize(torch.randn(ENOUGH // 16 - 1, 16))
    assert not counters["stats"]


def test_a_kernel_once_made_serves_small_tensors_too(
    compiler: None, monkeypatch: pytest.MonkeyPatch
):
    def made(function: Any, static: float, tensors: Any, odd: bool) -> Any:
        return lambda *given: function(static + 1, *given)

    monkeypatch.setattr(compiling, "_make", made)

    @compiled()
    def times(factor: float, x: Tensor) -> Tensor:
        return x * factor

    small, tiny = torch.ones(WORTHWHILE), torch.ones(WORTHWHILE - 1)
    assert times(2.0, small)[0] == 2
    assert times(2.0, torch.ones(ENOUGH))[0] == 3  # the kernel is made
    assert times(2.0, small)[0] == 3
    assert times(2.0, tiny)[0] == 2


def test_where_a_tensor_begins_needs_no_other_kernel(compiler: None):
    @compiled()
    def double(factor: float, x: Tensor) -> Tensor:
        return x * factor

    experts = torch.arange(40.0 * ENOUGH).view(40, ENOUGH)
    for expert in experts:  # more of them than the compiler makes kernels of one function
        assert torch.equal(double(2.0, expert), 2 * expert)


def test_a_kernel_that_differs_is_dropped(compiler: None):
    @compiled()
    def double(factor: float, x: Tensor) -> Tensor:
        return x * (factor + 1 if torch.compiler.is_compiling() else factor)

    x = torch.ones(ENOUGH)
    with pytest.warns(UserWarning, match="compiled kernel differs"):
        assert torch.equal(double(2.0, x), 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(double(2.0, x), 2 * x)


def test_a_kernel_that_differs_for_odd_numbers_is_dropped(compiler: None):
    @compiled(odd=True)
    def half(factor: float, x: Tensor) -> Tensor:
        y = x * factor
        return torch.where(y.abs() < 1e-38, 0.0, y) if torch.compiler.is_compiling() else y

    with pytest.warns(UserWarning, match="compiled kernel differs"):
        half(0.5, torch.ones(8, ENOUGH // 8))


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TORCH_COMPILE_DISABLE"} | environment
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


TWO_FORMATS = """
import torch
from lightning_qrl.formats import get_format
x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
for fmt in (get_format("nvfp4"), get_format("mxfp8")):
    assert torch.equal(fmt.quantize(x).dequantize(), fmt.fake_quantize(x))
print(fmt.fake_quantize(x).double().sum().item())
"""


def test_without_a_compiler_there_is_one_warning_and_the_same_numbers():
    broken = "import torch._inductor.config as c; c.cpp.cxx = ('no-such-compiler',)\n"
    done = run(broken + TWO_FORMATS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compute uncompiled, several times slower") == 1
    assert "no-such-compiler" in done.stderr
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    assert float(done.stdout) == get_format("mxfp8").fake_quantize(x).double().sum().item()


def test_torchs_switch_turns_it_off_without_a_word():
    check = "import sys; assert 'torch._inductor.codegen.cpp' not in sys.modules\n"
    done = run(TWO_FORMATS + check, TORCH_COMPILE_DISABLE="1")
    assert done.returncode == 0, done.stderr
    assert "uncompiled" not in done.stderr


def test_a_failure_is_remembered_for_its_device_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setattr(compiling, "_failed", {"cuda"})
    assert compiling._possible(torch.zeros(1))
    monkeypatch.setattr(compiling, "_failed", {"cpu"})
    assert not compiling._possible(torch.zeros(1))
    assert not compiling._possible(torch.zeros(1, device="meta"))
