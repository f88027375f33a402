"""Transformer Engine: the recipe that a `LinearPrecision` means, and the layer that runs it.

`recipe` is a pure function: from formats and backward mode to the name of one of Transformer
Engine's recipe classes and all of its arguments that matter, said outright, since their defaults
come from environment variables.

    Float8CurrentScaling   fp8_e4m3, one scale a tensor; gradient fp8_e4m3, or fp8_e5m2 (HYBRID)
    Float8BlockScaling     the same elements in blocks of 1x128 or 128x128; two operands of a GEMM
                           have not both 128x128; scales fp32, or e8m0 (power_2_scale of QParams)
    MXFP8BlockScaling      mxfp8 under scale_rule rceil, the rule of its kernels
    NVFP4BlockScaling      nvfp4; weights with one outer scale, in blocks of 1x16, or of 16x16 for
                           its 2-D quantization; activations with one outer scale a tensor or a row
                           (row_scaled_activation); four_over_six of either operand, with the bound
                           256 as ours (nvfp4_4over6); gradients with rounding stochastic (SR) and
                           hadamard 16 (RHT of dY and X in wgrad alone; its signs are its own)

`backward` is its `backward_override`; `quantized` is none.

A layer keeps our Parameter objects and names: the `te.Linear` inside is no registered module and
has no weight of its own, so no `_extra_state` reaches a checkpoint. Tokens are filled up with zeros
to a multiple of 32, which changes no scale of a real token. It computes in BF16 outside of the
quantized GEMMs.

Written against Transformer Engine 2.20.2, not run by us: it cannot be imported without CUDA. The
recipes are tested against the fields of its classes.

N tokens, I in features, O out features.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_qrl.formats import Format
from lightning_qrl.precision.backends.base import ADA, BLACKWELL, Backend, Chip, Shape
from lightning_qrl.precision.gemm import output_dtype
from lightning_qrl.precision.linear import LinearPrecision, QuantLinear

_Named = tuple[str, dict[str, Any]]

TOKENS = 32  # a multiple of them suits every recipe
DIMENSIONS = {(1, 128): 1, (128, 128): 2}  # what Transformer Engine calls these blocks
FEATURES = {
    "Float8CurrentScaling": 16,
    "Float8BlockScaling": 16,
    "MXFP8BlockScaling": 32,
    "NVFP4BlockScaling": 32,
}
HOPPER = (9, 0)
SINCE = {
    "Float8CurrentScaling": ADA,
    "Float8BlockScaling": HOPPER,
    "MXFP8BlockScaling": BLACKWELL,
    "NVFP4BlockScaling": BLACKWELL,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe of Transformer Engine.

    Attributes:
        name: of the class in `transformer_engine.common.recipe`.
        arguments: of its constructor; `fp8_format` by the name of the enum's member. And
            `fp8_quant_*`, attributes that the constructor does not take, by the arguments of their
            QParams.
    """

    name: str
    arguments: Mapping[str, Any]


def recipe(precision: LinearPrecision) -> Recipe:
    """The recipe that a precision means.

    Raises:
        ValueError: Transformer Engine has none; says why.
    """
    weight, activation = precision.weight, precision.activation
    if weight is None or activation is None:
        raise ValueError("Transformer Engine quantizes weight and activation or neither")
    if weight.name != activation.name:
        raise ValueError(f"Transformer Engine does not mix {weight.name} with {activation.name}")
    families = {"fp8_e4m3": _fp8, "mxfp8": _mxfp8, "nvfp4": _nvfp4}
    if weight.name not in families:
        raise ValueError(f"Transformer Engine has no recipe for {weight.name}")
    gradient = precision.gradient if precision.backward == "quantized" else None
    if precision.backward == "quantized" and gradient is None:
        raise ValueError("Transformer Engine's quantized backward needs a format of the gradient")
    mode = None if precision.backward == "quantized" else precision.backward
    name, arguments = families[weight.name](weight, activation, gradient)
    return Recipe(name, {**arguments, "backward_override": mode})


def _fp8(weight: Format, activation: Format, gradient: Format | None) -> _Named:
    hybrid = _hybrid(gradient, "fp8_e4m3", "fp8_e5m2")
    if any(_option(format, "block") != (1, 1) for format in (weight, activation)):
        return _fp8_blocks(weight, activation, gradient, hybrid)
    for format in (weight, activation, gradient):
        _only(format)
    powers = _powers_of_two(weight, activation, gradient)
    return "Float8CurrentScaling", {
        "fp8_format": hybrid,
        "use_power_2_scales": False,  # it reads this in one place, the QParams in others
        **powers,
    }


def _fp8_blocks(weight: Format, activation: Format, gradient: Format | None, hybrid: str) -> _Named:
    allow = {"block": tuple(DIMENSIONS), "outer_scale": ("none",)}
    for format in (weight, activation, gradient):
        _only(format, "block", "outer_scale", "block_scale", allow=allow)
    x, w, dy = (
        1 if format is None else DIMENSIONS[_option(format, "block")]
        for format in (activation, weight, gradient)
    )
    if x + w + dy > 4:  # every two of the three meet in a GEMM
        raise ValueError("Transformer Engine does not multiply two operands of block=[128, 128]")
    return "Float8BlockScaling", {
        "fp8_format": hybrid,
        "x_block_scaling_dim": x,
        "w_block_scaling_dim": w,
        "grad_block_scaling_dim": dy,
        **_powers_of_two(weight, activation, gradient),
    }


def _powers_of_two(
    weight: Format, activation: Format, gradient: Format | None
) -> dict[str, dict[str, bool]]:
    """The QParams of each operand; their defaults come from environment variables."""
    operands = {"fwd_inp": activation, "fwd_weight": weight, "bwd_grad": gradient}
    return {
        f"fp8_quant_{name}": {
            "power_2_scale": format is not None and _option(format, "block_scale") == "e8m0"
        }
        for name, format in operands.items()
    }


def _mxfp8(weight: Format, activation: Format, gradient: Format | None) -> _Named:
    for format in (weight, activation, gradient):
        if format is not None and _option(format, "scale_rule") != "rceil":
            raise ValueError(
                f"Transformer Engine scales MX blocks by scale_rule rceil, not {format}"
            )
        _only(format, "scale_rule")
    hybrid = _hybrid(gradient, "mxfp8", "mxfp8_e5m2")
    return "MXFP8BlockScaling", {"fp8_format": hybrid, "enable_2d_quantization": False}


def _nvfp4(weight: Format, activation: Format, gradient: Format | None) -> _Named:
    _only(weight, "four_over_six", "block")
    _only(activation, "four_over_six", "outer_scale", allow={"outer_scale": ("tensor", "row")})
    if gradient is not None and gradient.name != "nvfp4":
        raise ValueError(f"Transformer Engine does not mix nvfp4 with {gradient.name} gradients")
    _only(gradient, "rounding", "hadamard", allow={"hadamard": ("none", 16)})
    modes = [_option(format, "four_over_six") for format in (weight, activation)]
    used = [mode for mode in modes if mode != "none"]
    if len(set(used)) > 1:
        raise ValueError("Transformer Engine has one four_over_six error for both operands")
    rotates = gradient is not None and _option(gradient, "hadamard") == 16
    if rotates and modes[1] != "none":
        raise ValueError("Transformer Engine does not rotate (hadamard) what is four_over_six")
    scopes = {0: "none", 1: "weights" if modes[0] != "none" else "activations", 2: "all"}
    return "NVFP4BlockScaling", {
        "disable_rht": not rotates,
        "disable_stochastic_rounding": gradient is None
        or _option(gradient, "rounding") == "nearest",
        "disable_2d_quantization": _option(weight, "block") != (16, 16),
        "row_scaled_activation": _option(activation, "outer_scale") == "row",
        "nvfp4_4over6": scopes[len(used)],
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": used[0].upper() if used else "MAE",
    }


def _hybrid(gradient: Format | None, same: str, wide: str) -> str:
    """Transformer Engine's name of E4M3 forward with E4M3 or E5M2 gradients."""
    if gradient is None or gradient.name == same:
        return "E4M3"
    if gradient.name != wide:
        raise ValueError(f"Transformer Engine does not mix {same} with {gradient.name} gradients")
    return "HYBRID"


def _only(
    format: Format | None, *free: str, allow: Mapping[str, tuple[Any, ...]] | None = None
) -> None:
    """Refuse options that the recipe has no word for.

    Args:
        format: whose options.
        free: options that it has a word for.
        allow: values of them that it has a word for, where not all.
    """
    for option in () if format is None else format.options():
        value = getattr(format, option.name)
        allowed = (option.default,)
        if option.name in free:
            allowed = (allow or {}).get(option.name, (value,))
        if value not in allowed:
            raise ValueError(f"Transformer Engine has no {option.name}={value} for this operand")


def _option(format: Format, name: str) -> Any:
    return getattr(format, name)


class TransformerEngine(Backend):
    """FP8 on Ada and later, MXFP8 and NVFP4 on Blackwell, where Transformer Engine is installed."""

    name = "transformer_engine"

    @override
    def obstacle(self, precision: LinearPrecision, shape: Shape, chip: Chip) -> str | None:
        """A precision without a recipe, a layer of odd size, a chip without units, no package."""
        try:
            name = recipe(precision).name
        except ValueError as error:
            return str(error)
        if any(size % FEATURES[name] for size in shape):
            return f"Transformer Engine needs multiples of {FEATURES[name]}, not {shape}"
        if not chip.at_least(SINCE[name]):
            return f"{chip.name} has no units for Transformer Engine's {name}"
        if find_spec("transformer_engine") is None:
            return 'not installed: pip install "lightning_qrl[te]"'
        return None

    @override
    def idle(self, precision: LinearPrecision, chip: Chip) -> str | None:
        """Nothing: where it runs at all, it runs on the chip's units."""
        return None

    @override
    def layer(self) -> type[QuantLinear]:
        return EngineLinear


class EngineLinear(QuantLinear):
    """A `QuantLinear` whose precisions of this backend are computed by a `te.Linear`."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """[..., I] to [..., O], in the dtype that `nn.Linear` would return."""
        precision = self.precision[self.switch.current]
        if precision is None or precision.backend != TransformerEngine.name:
            return super().forward(input)
        from transformer_engine.pytorch import autocast

        dtype = output_dtype(input)
        x_NI = input.reshape(-1, self.in_features)
        filled_NI = functional.pad(x_NI, (0, 0, 0, -len(x_NI) % TOKENS))
        with (
            torch.autocast("cuda", torch.bfloat16),
            autocast(enabled=True, recipe=_build(precision)),
        ):
            y_NO: Tensor = self._engine()(filled_NI)[: len(x_NI)]
        return y_NO.to(dtype).view(*input.shape[:-1], self.out_features)

    def _engine(self) -> nn.Module:
        """The `te.Linear`, made at the first use; it computes with this layer's own Parameters."""
        from transformer_engine.pytorch import Linear

        if "engine" not in self.__dict__:
            bias = self.bias is not None
            made = Linear(self.in_features, self.out_features, bias=bias, device="meta")
            self.__dict__["engine"] = made  # past nn.Module, which would register it
        engine: nn.Module = self.__dict__["engine"]
        for name, parameter in self.named_parameters(recurse=False):
            engine._parameters[name] = parameter  # again each time: sharding swaps them
        return engine.train(self.training)


@functools.cache
def _build(precision: LinearPrecision) -> Any:
    """The recipe as an object of Transformer Engine's, one for all layers of a precision."""
    from transformer_engine.common import recipe as recipes

    meant = recipe(precision)
    arguments = dict(meant.arguments)
    if "fp8_format" in arguments:
        arguments["fp8_format"] = recipes.Format[arguments["fp8_format"]]
    after = {name: arguments.pop(name) for name in meant.arguments if "fp8_quant_" in name}
    made = getattr(recipes, meant.name)(**arguments)
    for name, parameters in after.items():
        setattr(made, name, recipes.QParams(**parameters))
    return made
