"""The chip's units, through torch's scaled multiply, the way of torchao's training layers.

The operands are quantized by our own formats, so codes and scales are those of the emulation bit
for bit; only the multiplication is the chip's. (torchao's own `Float8Linear` multiplies by
448 / amax where we divide by amax / 448. On normal values, that changed one code in three million
of FP32 values, and one in three thousand of BF16 ones, which lie on ties far more often.)

Parameters, state-dict keys and backward modes are those of `QuantLinear`. What runs where:
FP8 on Ada, Hopper and Blackwell, and without units on CPUs; MX and NVFP4 on Blackwell alone
(`_scaled_multiply` says what of that we ran).
"""

from typing_extensions import override

from lightning_qrl.formats import Format
from lightning_qrl.precision.backends._scaled_multiply import multiply
from lightning_qrl.precision.backends.base import ADA, BLACKWELL, Backend, Chip, Shape
from lightning_qrl.precision.linear import LinearPrecision, Multiply, QuantLinear

# By the format's name: what the units are called, and the chips that have them.
UNITS = {
    "fp8_e4m3": ("FP8", ADA),
    "fp8_e5m2": ("FP8", ADA),
    "mxfp8": ("MXFP8", BLACKWELL),
    "mxfp4": ("MXFP4", BLACKWELL),
    "nvfp4": ("NVFP4", BLACKWELL),
}


class TorchAO(Backend):
    """FP8 anywhere; MXFP8, MXFP4 and NVFP4 on Blackwell."""

    name = "torchao"

    @override
    def obstacle(self, precision: LinearPrecision, shape: Shape, chip: Chip) -> str | None:
        """A GEMM whose operands no unit multiplies; block scales on a chip without units."""
        gemms = [(precision.activation, precision.weight)]
        if precision.backward == "quantized":
            gemms += [(precision.gradient, precision.weight)]
            gemms += [(precision.gradient, precision.activation)]
        for a, b in gemms:
            reason = _mismatch(a, b)
            if reason:
                return reason
        rotations = {getattr(format, "hadamard", None) for format in gemms[0]}
        if len(rotations) > 1:  # in the backward they are always common to both
            return "the rotations of weight and activation differ, and would not cancel"
        return self.idle(precision, chip) if _units(precision)[1] == BLACKWELL else None

    @override
    def idle(self, precision: LinearPrecision, chip: Chip) -> str | None:
        """A chip without units for the format."""
        units, since = _units(precision)
        return None if chip.at_least(since) else f"{chip.name} has no {units} units"

    @override
    def layer(self) -> type[QuantLinear]:
        return ScaledLinear


def _units(precision: LinearPrecision) -> tuple[str, tuple[int, int]]:
    assert precision.weight is not None
    return UNITS[precision.weight.name]


def _mismatch(a: Format | None, b: Format | None) -> str | None:
    """Why no unit multiplies two formats; None where one does."""
    if a is None or b is None:
        return "an operand of its GEMM is not quantized"
    for format in (a, b):
        if format.name not in UNITS:
            return f"no unit multiplies {format.name}"
        if UNITS[format.name][0] == "FP8" and getattr(format, "block", (1, 1)) != (1, 1):
            return f"{format.name} in blocks is not wired to torch's scaled multiply"
    if UNITS[a.name] != UNITS[b.name]:
        return f"no unit multiplies {a.name} with {b.name}"
    if a.name == b.name == "fp8_e5m2":
        return "no unit multiplies fp8_e5m2 with itself"
    return None


class ScaledLinear(QuantLinear):
    """A `QuantLinear` that multiplies quantized operands natively where its backend is this one."""

    @override
    def multiplier(self, precision: LinearPrecision) -> Multiply:
        return multiply if precision.backend == TorchAO.name else super().multiplier(precision)
