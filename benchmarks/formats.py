"""Quantize-dequantize of a weight in every format, beside torchao's and beside a copy.

    python benchmarks/formats.py [--rows 1536] [--columns 576] [--threads 2] [--repeats 100]

Each row is one format on one FP32 tensor: ours compiled (`fake_quantize`), ours without a compiler,
torchao's own function (eager, and under torch.compile where that works), and `clone()`. All that
stand in a row are timed in turn, call by call, in one process, so that a busy machine slows all of
them; a time is the median. The second table is what the first call of a process costs: with an
empty compiler cache, and again with what that left behind.

Which function of torchao, since it has several:

    nvfp4     NVFP4Tensor.to_nvfp4 with per_tensor_amax_to_scale, dequantize
    mx*       MXTensor.to_mx, dequantize
    fp8_e4m3  _choose_scale_float8, _quantize_affine_float8, _dequantize_affine_float8
    int4      choose_qparams_affine, quantize_affine, dequantize_affine; groups of 32

torchao has no row-scaled NVFP4 and no four-over-six: those stand beside its plain NVFP4.
"""

import argparse
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _timing import interleaved_ms
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from lightning_qrl.formats import Format, get_format

Function = Callable[[Tensor], Tensor]
GROUP = 32


def nvfp4(x: Tensor) -> Tensor:
    """By torchao, with its two levels of scales."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(x.abs().amax())
    y: Tensor = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    return y


def mx(element: torch.dtype) -> Function:
    """By torchao."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return lambda x: MXTensor.to_mx(x, element, 32).dequantize(torch.float32)


def fp8(x: Tensor) -> Tensor:
    """By torchao, with one scale."""
    from torchao.quantization import quant_primitives as primitives

    scale = primitives._choose_scale_float8(x, [*x.shape])
    codes = primitives._quantize_affine_float8(x, scale)
    y: Tensor = primitives._dequantize_affine_float8(codes, scale)
    return y


def int4(x: Tensor) -> Tensor:
    """By torchao, in groups; its scales are FP32."""
    from torchao.quantization import quant_primitives as primitives

    how: dict[str, Any] = {"quant_min": -7, "quant_max": 7}
    symmetric = primitives.MappingType.SYMMETRIC_NO_CLIPPING_ERR
    scale, zero = primitives.choose_qparams_affine(x, symmetric, (1, GROUP), torch.int8, **how)
    codes = primitives.quantize_affine(x, (1, GROUP), scale, zero, torch.int8, **how)
    y: Tensor = primitives.dequantize_affine(codes, (1, GROUP), scale, zero, torch.int8, **how)
    return y


def cases() -> list[tuple[Format, Function]]:
    """Each format and what torchao has for it."""
    return [
        (get_format("nvfp4"), nvfp4),
        (get_format("nvfp4", outer_scale="row"), nvfp4),
        (get_format("nvfp4", four_over_six="mae"), nvfp4),
        (get_format("mxfp8"), mx(torch.float8_e4m3fn)),
        (get_format("fp8_e4m3"), fp8),
        (get_format("mxfp4"), mx(torch.float4_e2m1fn_x2)),
        (get_format("int4", outer_scale="none", block=(1, GROUP)), int4),
    ]


def compiled(function: Function, x: Tensor) -> Function | None:
    """The function under torch.compile; None where that fails, which is a "nan" in its column."""
    fast: Function = torch.compile(function)
    logging.disable(logging.CRITICAL)  # the whole graph, where it fails
    try:
        fast(x)
    except TorchDynamoException:
        return None
    finally:
        logging.disable(logging.NOTSET)
    return fast


def uncompiled(function: Function) -> Function:
    """As on a machine without a compiler; torch's own switch, which is read at each call."""

    def run(x: Tensor) -> Tensor:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        try:
            return function(x)
        finally:
            del os.environ["TORCH_COMPILE_DISABLE"]

    return run


def stored(fmt: Format) -> Function:
    """Through packed codes."""
    return lambda x: fmt.quantize(x).dequantize()


def speed(x: Tensor, repeats: int) -> None:
    """Print the first table."""
    names = ["ours", "eager", "stored", "torchao", "compiled", "clone"]
    head = "".join(f"{name:>10}" for name in names)
    print(f"{'format':34}{head}{'torchao/ours':>15}{'ours/clone':>12}{'eager/ours':>12}")
    for fmt, theirs in cases():
        functions: dict[str, Function | None] = {
            "ours": fmt.fake_quantize,
            "eager": uncompiled(fmt.fake_quantize),
            "stored": stored(fmt),
            "torchao": theirs,
            "compiled": compiled(theirs, x),
            "clone": Tensor.clone,
        }
        steps = {name: partial(f, x) for name, f in functions.items() if f is not None}
        ms = dict.fromkeys(names, math.nan) | interleaved_ms(steps, repeats)
        ratios = ms["torchao"] / ms["ours"], ms["ours"] / ms["clone"], ms["eager"] / ms["ours"]
        row = "".join(f"{ms[name]:10.2f}" for name in names)
        print(f"{fmt!s:34}{row}{ratios[0]:14.1f}x{ratios[1]:11.1f}x{ratios[2]:11.1f}x", flush=True)


FIRST_CALL = """
import sys, time, torch
from lightning_qrl.formats import get_format
torch.set_num_threads({threads})
x = torch.randn({rows}, {columns})
fmt = get_format({name!r}, **{options!r})
import torch._dynamo, torch._inductor.compile_fx
start = time.perf_counter()
fmt.fake_quantize(x)
print(time.perf_counter() - start)
"""


def first_calls(rows: int, columns: int, threads: int) -> None:
    """Seconds until the first result of a process, the compiler's import left out."""
    print(f"\n{'first call, s':34}{'empty cache':>12}{'again':>10}")
    options: list[tuple[str, dict[str, object]]] = [
        ("nvfp4", {}),
        ("nvfp4", {"four_over_six": "mae"}),
        ("mxfp8", {}),
        ("fp8_e4m3", {}),
    ]
    for name, extra in options:
        code = FIRST_CALL.format(
            rows=rows, columns=columns, threads=threads, name=name, options=extra
        )
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            cold, warm = (
                float(subprocess.check_output([sys.executable, "-c", code], env=env, text=True))
                for _ in range(2)
            )
        print(f"{get_format(name, **extra)!s:34}{cold:12.1f}{warm:10.1f}", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--columns", type=int, default=576)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--no-first-calls", action="store_true", help="leave out the second table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = torch.randn(args.rows, args.columns, generator=torch.Generator().manual_seed(0))
    print(
        f"{args.rows} x {args.columns} FP32, CPU, {args.threads} threads, torch "
        f"{torch.__version__}, medians of {args.repeats} in ms; stored: packed codes and back"
    )
    speed(x, args.repeats)
    if not args.no_first_calls:
        first_calls(args.rows, args.columns, args.threads)


if __name__ == "__main__":
    main()
