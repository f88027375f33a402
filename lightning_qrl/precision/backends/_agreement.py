"""The agreement test: a small layer computed natively, against its emulation.

Native results are taken only from a backend that gives the numbers that we say it gives. A layer of
BF16 values is computed both ways, the emulation in FP32, and each of Y, dX and dW must satisfy

    |native - emulated| <= 2^-8 |emulated|        in the Euclidean norm

2^-8 is what one rounding to BF16 can do to every element; it does about a third of that to the
norm. A different scale rule or block size is at 10 to 100 times as much. Gradients with noise
of their own (stochastic rounding, random signs of a Hadamard transform) are left out.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_qrl.precision.backends.base import Backend
from lightning_qrl.precision.linear import LinearPrecision, QuantLinear
from lightning_qrl.precision.sides import SideSwitch

ONE_ROUNDING = 2.0**-8  # of BF16, relative
TOKENS, IN, OUT = 33, 96, 64


def disagreement(backend: Backend, precision: LinearPrecision, device: str) -> str | None:
    """Why a backend is not to be used for a precision; None if it agrees.

    Args:
        backend: the backend.
        precision: what the layer computes in.
        device: where.
    """
    try:
        off = deviations(backend, precision, device)
    except Exception as error:  # whatever keeps it from running is the reason
        return f"its test failed: {str(error).strip().splitlines()[0]}"
    for name, deviation in off.items():
        if not deviation <= ONE_ROUNDING and (name == "Y" or not _is_noisy(precision)):
            return f"its {name} is off by {deviation:.1%}"
    return None


def deviations(backend: Backend, precision: LinearPrecision, device: str) -> dict[str, float]:
    """|native - emulated| / |emulated| of Y, dX and dW."""
    named = replace(precision, backend=backend.name)
    native = _results(backend.layer(), named, torch.bfloat16, device)
    plain = replace(precision, backend="emulate")
    emulated = _results(QuantLinear, plain, torch.float32, device)
    pairs = zip(("Y", "dX", "dW"), native, emulated, strict=True)
    return {
        name: float((theirs.double() - ours.double()).norm() / ours.double().norm())
        for name, theirs, ours in pairs
    }


def _results(
    layer: type[QuantLinear], precision: LinearPrecision, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, dX and dW of a small layer, of values that BF16 holds."""
    draws = torch.Generator().manual_seed(0)
    x, dy, weight = (
        torch.randn(shape, generator=draws).bfloat16().to(device, dtype)
        for shape in ((TOKENS, IN), (TOKENS, OUT), (OUT, IN))
    )
    linear = nn.Linear(IN, OUT, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.float())
    module = layer.from_linear(linear, precision, precision, SideSwitch())
    x.requires_grad_()
    with torch.enable_grad():
        y = module(x)
    dx, dw = torch.autograd.grad(y, (x, module.weight), dy)
    return y.detach(), dx, dw


def _is_noisy(precision: LinearPrecision) -> bool:
    formats = (precision.weight, precision.activation, precision.gradient)
    return precision.backward == "quantized" and any(
        getattr(f, "rounding", "nearest") == "stochastic"
        or getattr(f, "hadamard", "none") != "none"
        for f in formats
    )
