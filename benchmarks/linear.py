"""Quantized linear layers on the CPU: their time and what they keep, beside BF16, FP32 and torchao.

Prints one table: for each layer the median time of a forward and backward (Y, dX and dW), its ratio
to `nn.Linear` in plain BF16 and in FP32, and the bits that are kept of an activation for the
backward, an element, measured by autograd's hooks. Input in FP32 is `trainer.precision: 32-true`,
where the emulated GEMMs run in FP32; input in BF16 is what a layer sees under `bf16-mixed`, where
they run in BF16, exactly. Parameters of quantized layers are FP32, as in training. On a CPU without
BF16 units (it is said above the table) BF16 GEMMs are emulated themselves, many times slower than
FP32: the ratio that means something is then that of FP32 input to FP32.

    python benchmarks/linear.py
    OMP_NUM_THREADS=1 python benchmarks/linear.py --rounds 5

The target: the dequantized backward takes at most 1.6 times plain BF16.

N tokens, I in features, O out features.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _timing import interleaved_ms
from torch import Tensor, nn

from lightning_qrl.formats import get_format
from lightning_qrl.precision import LinearPrecision, QuantLinear
from lightning_qrl.precision.sides import SideSwitch
from lightning_qrl.reports.tables import text_table

DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
PLAIN = {"BF16": "nn.Linear, BF16", "FP32": "nn.Linear, FP32"}
SQUARE = get_format("nvfp4", block=(16, 16))
NOISY = get_format("nvfp4", rounding="stochastic", hadamard=16)
ROW_4_6 = get_format("nvfp4", outer_scale="row", four_over_six="mae")
NVFP4, NVFP4_4_6, MXFP8, FP8, INT4 = (
    get_format(name, **options)
    for name, options in (
        ("nvfp4", {}),
        ("nvfp4", {"four_over_six": "mae"}),
        ("mxfp8", {}),
        ("fp8_e4m3", {}),
        ("int4", {"block": (1, 32), "outer_scale": "none"}),
    )
)
PRECISIONS = {
    "nvfp4 as in recipes/4bitter": LinearPrecision(NVFP4_4_6, ROW_4_6, None, "dequantized"),
    "nvfp4, dequantized": LinearPrecision(NVFP4, NVFP4, None, "dequantized"),
    "mxfp8, dequantized": LinearPrecision(MXFP8, MXFP8, None, "dequantized"),
    "fp8_e4m3, dequantized": LinearPrecision(FP8, FP8, None, "dequantized"),
    "int4 weights, bf16": LinearPrecision(INT4, get_format("bf16"), None, "dequantized"),
    "nvfp4 as in nvfp4_pretraining": LinearPrecision(SQUARE, NVFP4, NOISY, "quantized"),
}


class Case(NamedTuple):
    """A layer, and the dtype of what it is given."""

    layer: nn.Module
    input: str


def main() -> None:
    """Parse, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--shape", type=int, nargs=2, default=[576, 1536], metavar=("I", "O"))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    linear = nn.Linear(*args.shape, bias=False)
    found, missing = torchao_cases(linear)
    cases = {**our_cases(linear), **found}
    given = {name: torch.randn(args.tokens, args.shape[0], dtype=t) for name, t in DTYPES.items()}
    dys = {name: torch.randn(args.tokens, args.shape[1], dtype=t) for name, t in DTYPES.items()}
    for name, case in list(cases.items()):
        try:
            both_ways(case.layer, given[case.input], dys[case.input])
        except (RuntimeError, ValueError, NotImplementedError) as error:
            missing.append((name, str(error).splitlines()[0]))
            del cases[name]
    steps: dict[str, Callable[[], object]] = {
        name: functools.partial(both_ways, case.layer, given[case.input], dys[case.input])
        for name, case in cases.items()
    }
    medians = interleaved_ms(steps, args.rounds)
    kept = {name: kept_bits(case.layer, given[case.input]) for name, case in cases.items()}
    i, o = args.shape
    print(
        f"{args.tokens} tokens, {i} -> {o}, forward and backward, medians of {args.rounds} rounds"
    )
    units = "" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "no "
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, {units}BF16 units in this CPU\n")
    print(report(cases, medians, kept), end="")
    for name, reason in missing:
        print(f"does not run here: {name}: {reason}")


def our_cases(linear: nn.Linear) -> dict[str, Case]:
    """The plain layers, and the quantized ones for both inputs."""
    bf16 = nn.Linear(linear.in_features, linear.out_features, bias=False, dtype=torch.bfloat16)
    bf16.load_state_dict(linear.state_dict())
    cases = {PLAIN["BF16"]: Case(bf16, "BF16"), PLAIN["FP32"]: Case(linear, "FP32")}
    for input in DTYPES:
        for name, precision in PRECISIONS.items():
            layer = QuantLinear.from_linear(linear, precision, precision, SideSwitch())
            cases[f"{name} <- {input}"] = Case(layer, input)
    return cases


def torchao_cases(linear: nn.Linear) -> tuple[dict[str, Case], list[tuple[str, str]]]:
    """Layers of torchao that compute the forward in low precision, with parameters in BF16.

    Its MX and NVFP4 layers keep codes for the backward, as ours do; its FP8 layer keeps the
    original activation and quantizes it again.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.qat.mx import MXFakeQuantizeConfig, MXFakeQuantizedLinear
    from torchao.prototype.qat.nvfp4 import NVFP4FakeQuantizeConfig, NVFP4FakeQuantizedLinear

    def fp8(recipe: str) -> nn.Module:
        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(nn.Sequential(plain()), config=config)

    def plain() -> nn.Linear:
        copy = nn.Linear(linear.in_features, linear.out_features, bias=False, dtype=torch.bfloat16)
        copy.load_state_dict(linear.state_dict())
        return copy

    nvfp4, mxfp8 = NVFP4FakeQuantizeConfig(), MXFakeQuantizeConfig(dtype=torch.float8_e4m3fn)
    made: dict[str, Callable[[], nn.Module]] = {
        "torchao NVFP4FakeQuantizedLinear": lambda: NVFP4FakeQuantizedLinear.from_linear(
            plain(), nvfp4, nvfp4
        ),
        "torchao MXFakeQuantizedLinear, mxfp8": lambda: MXFakeQuantizedLinear.from_linear(
            plain(), mxfp8, mxfp8
        ),
        "torchao Float8Linear, tensorwise": lambda: fp8("tensorwise"),
        "torchao Float8Linear, rowwise": lambda: fp8("rowwise"),
    }
    return {f"{name} <- BF16": Case(make(), "BF16") for name, make in made.items()}, []


def both_ways(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Forward and backward."""
    y = layer(x.detach().requires_grad_())
    torch.autograd.backward(y, dy)
    layer.zero_grad()


def kept_bits(layer: nn.Module, x: Tensor) -> float:
    """Bits that are kept of X for the backward, an element; X wants no gradient, so W is not."""
    kept: list[Tensor] = []
    weights = [(p.shape, p.data_ptr()) for p in layer.parameters()]

    def pack(tensor: Tensor) -> Tensor:
        # torchao keeps W, or codes of it, whether they are needed or not
        if not any(tensor.shape == shape or tensor.data_ptr() == at for shape, at in weights):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return 8 * sum(nbytes(t) for t in kept) / x.numel()


def nbytes(tensor: Any) -> int:
    """Bytes of a tensor; of its parts, where it is of torchao's kind."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts, _ = tensor.__tensor_flatten__()
        return sum(nbytes(getattr(tensor, part)) for part in parts)
    return int(tensor.nbytes)


def report(cases: dict[str, Case], medians: dict[str, float], kept: dict[str, float]) -> str:
    """The table."""
    headings = ["layer <- input", "ms", "x BF16", "x FP32", "bits kept of X"]
    rows = [
        [
            name,
            f"{medians[name]:.2f}",
            f"{medians[name] / medians[PLAIN['BF16']]:.2f}",
            f"{medians[name] / medians[PLAIN['FP32']]:.2f}",
            f"{kept[name]:.2f}",
        ]
        for name in cases
    ]
    return text_table(headings, rows)


if __name__ == "__main__":
    main()
