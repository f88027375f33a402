"""The recipe that a precision means, against the classes of Transformer Engine 2.20.2.

Transformer Engine cannot be imported without CUDA, so the fields of its recipes are copied here
(transformer_engine/common/recipe/__init__.py), with the values that its own checks allow.
"""

import re

import pytest
import torch
from torch import nn

from lightning_qrl.formats import get_format
from lightning_qrl.precision import LinearPrecision
from lightning_qrl.precision.backends.base import CPU, Chip
from lightning_qrl.precision.backends.transformer_engine import TransformerEngine, recipe

BOOL, OVERRIDES, SCOPES = (
    (False, True),
    (None, "high_precision", "dequantized"),
    ("none", "weights", "activations", "all"),
)
DIMENSION = (1, 2)
QPARAMS = ({"power_2_scale": False}, {"power_2_scale": True})
OF_EACH_OPERAND = {  # class attributes, which are set after construction
    "fp8_quant_fwd_inp": QPARAMS,
    "fp8_quant_fwd_weight": QPARAMS,
    "fp8_quant_bwd_grad": QPARAMS,
}
FIELDS = {
    "Float8CurrentScaling": {
        "fp8_format": ("E4M3", "HYBRID"),
        "use_power_2_scales": BOOL,
        "backward_override": OVERRIDES,
        **OF_EACH_OPERAND,
    },
    "Float8BlockScaling": {
        "fp8_format": ("E4M3", "HYBRID"),
        "x_block_scaling_dim": DIMENSION,
        "w_block_scaling_dim": DIMENSION,
        "grad_block_scaling_dim": DIMENSION,
        "backward_override": OVERRIDES,
        **OF_EACH_OPERAND,
    },
    "MXFP8BlockScaling": {
        "fp8_format": ("E4M3", "HYBRID"),
        "enable_2d_quantization": BOOL,
        "backward_override": OVERRIDES,
    },
    "NVFP4BlockScaling": {
        "disable_rht": BOOL,
        "disable_stochastic_rounding": BOOL,
        "disable_2d_quantization": BOOL,
        "row_scaled_activation": BOOL,
        "nvfp4_4over6": SCOPES,
        "nvfp4_4over6_e4m3_use_256": SCOPES,
        "nvfp4_4over6_err_mode": ("MAE", "MSE"),
        "backward_override": OVERRIDES,
    },
}
HOPPER, BLACKWELL = Chip("NVIDIA H200", (9, 0)), Chip("NVIDIA B200", (10, 0))


def nvfp4(**options):
    return get_format("nvfp4", **options)


def precision(weight, activation, backward="dequantized", gradient=None):
    return LinearPrecision(weight, activation, gradient, backward)


NVFP4_BASE = {
    "disable_rht": True,
    "disable_stochastic_rounding": True,
    "disable_2d_quantization": True,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
    "backward_override": "dequantized",
}
FP8, MXFP8 = get_format("fp8_e4m3"), get_format("mxfp8", scale_rule="rceil")
PRETRAINING = nvfp4(rounding="stochastic", hadamard=16)
ANY, POWERS = {"power_2_scale": False}, {"power_2_scale": True}
CURRENT = {
    "use_power_2_scales": False,
    "fp8_quant_fwd_inp": ANY,
    "fp8_quant_fwd_weight": ANY,
    "fp8_quant_bwd_grad": ANY,
}
MX = {"enable_2d_quantization": False}
MEANT = [
    (precision(nvfp4(), nvfp4()), {}),
    (precision(nvfp4(), nvfp4(), "high_precision"), {"backward_override": "high_precision"}),
    # The 4-bitter recipe: weights by tensor, activations by row, four over six by mean error.
    (
        precision(nvfp4(four_over_six="mae"), nvfp4(four_over_six="mae", outer_scale="row")),
        {"row_scaled_activation": True, "nvfp4_4over6": "all"},
    ),
    (
        precision(nvfp4(four_over_six="mse"), nvfp4()),
        {"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "MSE"},
    ),
    (precision(nvfp4(), nvfp4(four_over_six="mae")), {"nvfp4_4over6": "activations"}),
    # NVIDIA's pretraining recipe: Transformer Engine's own defaults.
    (
        precision(nvfp4(block=(16, 16)), nvfp4(), "quantized", PRETRAINING),
        {
            "disable_rht": False,
            "disable_stochastic_rounding": False,
            "disable_2d_quantization": False,
            "backward_override": None,
        },
    ),
    (precision(nvfp4(), nvfp4(), "quantized", nvfp4()), {"backward_override": None}),
    (precision(nvfp4(), nvfp4(), "dequantized", PRETRAINING), {}),  # no gradient is quantized
]


@pytest.mark.parametrize(("asked", "differs"), MEANT, ids=str)
def test_nvfp4_recipes(asked, differs):
    meant = recipe(asked)
    assert meant.name == "NVFP4BlockScaling"
    assert dict(meant.arguments) == {**NVFP4_BASE, **differs}


@pytest.mark.parametrize(
    ("weight", "backward", "gradient", "name", "arguments"),
    [
        (FP8, "dequantized", None, "Float8CurrentScaling", {"fp8_format": "E4M3", **CURRENT}),
        (FP8, "quantized", FP8, "Float8CurrentScaling", {"fp8_format": "E4M3", **CURRENT}),
        (
            FP8,
            "quantized",
            get_format("fp8_e5m2"),
            "Float8CurrentScaling",
            {"fp8_format": "HYBRID", **CURRENT},
        ),
        (MXFP8, "high_precision", None, "MXFP8BlockScaling", {"fp8_format": "E4M3", **MX}),
        (MXFP8, "quantized", MXFP8, "MXFP8BlockScaling", {"fp8_format": "E4M3", **MX}),
        (
            MXFP8,
            "quantized",
            get_format("mxfp8_e5m2", scale_rule="rceil"),
            "MXFP8BlockScaling",
            {"fp8_format": "HYBRID", **MX},
        ),
    ],
)
def test_fp8_and_mxfp8_recipes(weight, backward, gradient, name, arguments):
    meant = recipe(precision(weight, weight, backward, gradient))
    override = None if backward == "quantized" else backward
    assert meant.name == name
    assert dict(meant.arguments) == {**arguments, "backward_override": override}


def fp8_block(rows=1, block_scale="fp32", name="fp8_e4m3", **more):
    block = {"block": (rows, 128), "outer_scale": "none", "block_scale": block_scale}
    return get_format(name, **block, **more)


BLOCK_BASE = {
    "fp8_format": "E4M3",
    "x_block_scaling_dim": 1,
    "w_block_scaling_dim": 2,
    "grad_block_scaling_dim": 1,
    "fp8_quant_fwd_inp": ANY,
    "fp8_quant_fwd_weight": ANY,
    "fp8_quant_bwd_grad": ANY,
    "backward_override": None,
}
BLOCKS = [
    # Unified FP8, and with Transformer Engine's own defaults.
    (precision(fp8_block(128), fp8_block(), "quantized", fp8_block()), {}),
    (
        precision(fp8_block(128, "e8m0"), fp8_block(1, "e8m0"), "quantized", fp8_block(1, "e8m0")),
        {"fp8_quant_fwd_inp": POWERS, "fp8_quant_fwd_weight": POWERS, "fp8_quant_bwd_grad": POWERS},
    ),
    (
        precision(fp8_block(128, "e8m0"), fp8_block()),
        {"fp8_quant_fwd_weight": POWERS, "backward_override": "dequantized"},
    ),
    (
        precision(fp8_block(), fp8_block(128), "high_precision"),
        {
            "x_block_scaling_dim": 2,
            "w_block_scaling_dim": 1,
            "backward_override": "high_precision",
        },
    ),
    (
        precision(fp8_block(), fp8_block(), "quantized", fp8_block(128, name="fp8_e5m2")),
        {"fp8_format": "HYBRID", "w_block_scaling_dim": 1, "grad_block_scaling_dim": 2},
    ),
]


@pytest.mark.parametrize(("asked", "differs"), BLOCKS, ids=str)
def test_fp8_block_recipes(asked, differs):
    meant = recipe(asked)
    assert meant.name == "Float8BlockScaling"
    assert dict(meant.arguments) == {**BLOCK_BASE, **differs}


EVERY = [*(asked for asked, _ in MEANT + BLOCKS), precision(FP8, FP8), precision(MXFP8, MXFP8)]


@pytest.mark.parametrize("asked", EVERY, ids=str)
def test_arguments_are_fields_of_the_class(asked):
    """With all that could come from an environment variable said outright."""
    meant = recipe(asked)
    fields = FIELDS[meant.name]
    assert meant.arguments.keys() == fields.keys()
    assert all(value in fields[name] for name, value in meant.arguments.items())


REFUSED = [
    (precision(nvfp4(), None), "neither"),
    (precision(None, FP8), "neither"),
    (precision(nvfp4(), FP8), "mix nvfp4 with fp8_e4m3"),
    (precision(get_format("int8"), get_format("int8")), "no recipe for int8"),
    (precision(get_format("mxfp4"), get_format("mxfp4")), "no recipe for mxfp4"),
    (precision(FP8, get_format("fp8_e4m3", outer_scale="row")), "outer_scale=row"),
    (precision(fp8_block(128), FP8), r"block=(1, 1)"),
    (precision(FP8, FP8, "quantized", fp8_block()), r"block=(1, 128)"),
    (precision(fp8_block(128), fp8_block(128)), "two operands of block=[128, 128]"),
    (precision(fp8_block(128), fp8_block(), "quantized", fp8_block(128)), "two operands"),
    (precision(fp8_block(), fp8_block(128), "quantized", fp8_block(128)), "two operands"),
    (precision(fp8_block(128), fp8_block(hadamard=16)), "hadamard=16"),
    (precision(fp8_block(128), fp8_block(), "quantized", get_format("int8")), "with int8"),
    (precision(get_format("mxfp8"), get_format("mxfp8")), "scale_rule rceil"),
    (precision(nvfp4(outer_scale="row"), nvfp4()), "outer_scale=row"),
    (precision(nvfp4(), nvfp4(outer_scale="none")), "outer_scale=none"),
    (precision(nvfp4(), nvfp4(hadamard=16)), "hadamard=16"),
    (precision(nvfp4(scale_floor=0.5), nvfp4()), "scale_floor=0.5"),
    (precision(nvfp4(rounding="stochastic"), nvfp4()), "rounding=stochastic"),
    (precision(nvfp4(), nvfp4(block=(16, 16))), "block="),
    (precision(nvfp4(four_over_six="mae"), nvfp4(four_over_six="mse")), "one four_over_six"),
    (precision(nvfp4(), nvfp4(), "quantized"), "format of the gradient"),
    (precision(nvfp4(), nvfp4(), "quantized", FP8), "mix nvfp4 with fp8_e4m3"),
    (precision(FP8, FP8, "quantized", nvfp4()), "mix fp8_e4m3 with nvfp4"),
    (precision(nvfp4(), nvfp4(), "quantized", nvfp4(hadamard=32)), "hadamard=32"),
    (precision(nvfp4(), nvfp4(four_over_six="mae"), "quantized", PRETRAINING), "does not rotate"),
]


@pytest.mark.parametrize(("asked", "says"), REFUSED, ids=str)
def test_what_it_cannot_express_is_refused(asked, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        recipe(asked)
    obstacle = TransformerEngine().obstacle(asked, (64, 64), BLACKWELL)
    assert obstacle is not None
    assert says in obstacle


def test_obstacles():
    obstacle = TransformerEngine().obstacle
    fp8, fp4 = precision(FP8, FP8), precision(nvfp4(), nvfp4())
    assert "this CPU has no units" in obstacle(fp8, (64, 64), CPU)
    assert "H200 has no units" in obstacle(fp4, (64, 64), HOPPER)
    assert "multiples of 16" in obstacle(fp8, (64, 40), HOPPER)
    blocks = precision(fp8_block(128), fp8_block())
    assert "Ada has no units for Transformer Engine's Float8BlockScaling" in obstacle(
        blocks, (64, 64), Chip("Ada", (8, 9))
    )
    assert "multiples of 16" in obstacle(blocks, (64, 40), HOPPER)
    assert "multiples of 32" in obstacle(fp4, (48, 64), BLACKWELL)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    obstacle = TransformerEngine().obstacle(precision(FP8, FP8), (64, 64), HOPPER)
    assert "pip install" in obstacle
    assert "[te]" in obstacle


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
@pytest.mark.parametrize(
    ("weight", "activation"), [(FP8, FP8), (fp8_block(128), fp8_block())], ids=str
)
def test_the_layer_agrees_with_the_emulation_and_keeps_names(weight, activation, backward):
    pytest.importorskip("transformer_engine")
    from lightning_qrl.precision.backends._agreement import disagreement
    from lightning_qrl.precision.sides import SideSwitch

    backend = TransformerEngine()
    asked = LinearPrecision(weight, activation, None, backward, backend="transformer_engine")
    assert disagreement(backend, asked, "cuda") is None
    linear = nn.Linear(64, 32, device="cuda")
    module = backend.layer().from_linear(linear, asked, asked, SideSwitch())
    assert module(torch.randn(3, 5, 64, device="cuda")).shape == (3, 5, 32)
    assert list(module.state_dict()) == ["weight", "bias"]
    assert module.weight is linear.weight
