"""FP8 on a GPU: does the scaled multiply agree with our emulation, and what does it gain.

Prints two tables in under 6 minutes: for each scaling and backward mode, how far Y, dX and dW of
the native layer are from the emulated ones (in the norm, against one rounding to BF16), and for
each size of a square GEMM the median time of BF16, of the scaled multiply alone, of quantizing, and
of whole layers, forward and backward.

    python benchmarks/h200.py
    python benchmarks/h200.py --device cpu --sizes 256 --repeats 3      # its logic, without a GPU

N tokens = I in features = O out features = the size.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_qrl.formats import Format, get_format
from lightning_qrl.precision import LinearPrecision, QuantLinear
from lightning_qrl.precision.backends import choose, find_chip
from lightning_qrl.precision.backends._agreement import ONE_ROUNDING, deviations
from lightning_qrl.precision.backends._scaled_multiply import multiply
from lightning_qrl.precision.backends.torchao import ScaledLinear, TorchAO
from lightning_qrl.precision.sides import SideSwitch

TENSOR, ROW = get_format("fp8_e4m3"), get_format("fp8_e4m3", outer_scale="row")
E5M2 = get_format("fp8_e5m2", outer_scale="row")
SCALINGS = {
    "tensor x tensor": (TENSOR, TENSOR),
    "row x tensor": (ROW, TENSOR),
    "row x row": (ROW, ROW),
}
BACKWARDS = ("high_precision", "dequantized", "quantized")


def agreement(device: str) -> None:
    """Print how far the native layer is from the emulated one."""
    print(f"{'activation x weight':20} {'backward':15} {'Y':>9} {'dX':>9} {'dW':>9}  verdict")
    for name, (activation, weight) in SCALINGS.items():
        for backward in BACKWARDS:
            precision = LinearPrecision(weight, activation, E5M2, backward)
            off = deviations(TorchAO(), precision, device)
            verdict = "agrees" if max(off.values()) <= ONE_ROUNDING else "DISAGREES"
            cells = " ".join(f"{value:9.2e}" for value in off.values())
            print(f"{name:20} {backward:15} {cells}  {verdict}")
    print(f"one rounding to BF16: {ONE_ROUNDING:.2e}; every number must be below\n")


def times(size: int, device: str, repeats: int) -> None:
    """Print the times of one size."""
    torch.manual_seed(0)
    x, dy = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    linear = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
    w = linear.weight.detach()
    steps: dict[str, Callable[[], Any]] = {"BF16 GEMM": lambda: x @ w.T}
    for name, (activation, weight) in SCALINGS.items():
        a, b = activation.operand(x), weight.operand(w)
        a.quantized(), b.quantized()
        steps[f"FP8 GEMM, {name}"] = lambda a=a, b=b: multiply(a, b, torch.bfloat16)
    steps["quantize a matrix, tensor"] = lambda: TENSOR.operand(x).quantized()
    steps["quantize a matrix, row"] = lambda: ROW.operand(x).quantized()
    steps["BF16 linear, forward and backward"] = lambda: both_ways(linear, x, dy)
    for backward in BACKWARDS:
        native = layer(ScaledLinear, linear, backward, ROW, TENSOR)
        emulated = layer(QuantLinear, linear, backward, ROW, TENSOR)
        steps[f"FP8 linear, {backward}"] = lambda m=native: both_ways(m, x, dy)
        steps[f"emulated linear, {backward}"] = lambda m=emulated: both_ways(m, x, dy)
    report(size, {name: median_ms(step, device, repeats) for name, step in steps.items()})


def report(size: int, medians: dict[str, float]) -> None:
    """Print one size: milliseconds, TFLOP/s, and the speed against BF16."""
    print(f"{size} x {size} x {size}")
    for name, ms in medians.items():
        gemms = 3 if "linear" in name else 1
        whole = medians["BF16 linear, forward and backward" if gemms == 3 else "BF16 GEMM"]
        flops = (
            "" if name.startswith("quantize") else f"{gemms * 2 * size**3 / ms / 1e9:9.1f} TFLOP/s"
        )
        print(f"  {name:36} {ms:9.3f} ms  {whole / ms:6.2f} x BF16  {flops}")
    print()


def layer(
    kind: type[QuantLinear], linear: nn.Linear, backward: Any, activation: Format, weight: Format
) -> QuantLinear:
    """A quantized layer with the weight of a plain one."""
    backend = "torchao" if kind is ScaledLinear else "emulate"
    precision = LinearPrecision(weight, activation, E5M2, backward, backend)
    return kind.from_linear(linear, precision, precision, SideSwitch())


def both_ways(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward."""
    y = module(x.detach().requires_grad_())
    torch.autograd.backward(y, dy)
    module.zero_grad()


def median_ms(step: Callable[[], Any], device: str, repeats: int) -> float:
    """The median time of a step, after it has run twice (kernels are compiled at first)."""
    seconds = []
    for i in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Parse, and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    chip = find_chip(args.device)
    print(f"{chip.name}, compute capability {chip.capability}, torch {torch.__version__}")
    choice = choose("auto", LinearPrecision(TENSOR, ROW), (64, 64), chip)
    print(f"auto takes {choice.backend}: {choice.why}\n")
    agreement(args.device)
    for size in args.sizes:
        times(size, args.device, args.repeats)


if __name__ == "__main__":
    main()
