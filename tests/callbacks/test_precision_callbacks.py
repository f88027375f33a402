"""The precision callbacks: what each one declares, and what it refuses."""

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from callbacks.base import PrecisionCallback
from callbacks.bf16_tail import BF16Tail
from callbacks.dequantized_backward import DequantizedBackward
from callbacks.forward_quantization import ForwardQuantization
from callbacks.fp16 import FP16
from callbacks.fp32_lm_head import FP32LmHead
from callbacks.no_decay_on_quantized import NoDecayOnQuantized
from callbacks.quantized_backward import QuantizedBackward
from callbacks.sensitive_weights import SensitiveWeights
from lightning_qrl.errors import UserError
from lightning_qrl.formats import get_format
from lightning_qrl.plugins import load_plugin, plugin_names, snake_case
from lightning_qrl.precision import LinearPrecision, PrecisionPlan
from lightning_qrl.precision.resolve import BF16

NVFP4 = get_format("nvfp4")
LAYERS = 4
UP_PROJ = "model.layers.0.mlp.up_proj"


def table(*callbacks):
    """The rows of a Llama of four layers, by layer."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = PrecisionPlan()
    for callback in callbacks:
        callback.declare(plan)
    plan.commit(model)
    return {row.layer: row for row in plan.table()}


def quantized(rows):
    return {layer for layer, row in rows.items() if row.quantized}


def every_precision_callback():
    found = (load_plugin("callbacks", name) for name in plugin_names("callbacks"))
    return {c for c in found if issubclass(c, PrecisionCallback)}


def test_each_precision_callback_is_tested_here():
    assert every_precision_callback() == {
        BF16Tail,
        DequantizedBackward,
        FP16,
        FP32LmHead,
        ForwardQuantization,
        NoDecayOnQuantized,
        QuantizedBackward,
        SensitiveWeights,
    }


# --- the base ---------------------------------------------------------------------------------


def test_a_callback_is_called_by_its_recipes_key():
    assert BF16Tail(0.5).handle == "bf16_tail"
    assert NoDecayOnQuantized().handle == "no_decay_on_quantized"
    assert snake_case("MXFP8Router2Tail") == "mxfp8_router2_tail"
    tail = BF16Tail(0.5)
    tail.handle = "my_tail"
    assert table(ForwardQuantization("nvfp4"), tail)["model.layers.3.mlp.up_proj"].kept_by == (
        "my_tail",
    )


def test_a_plain_module_is_refused(tmp_path):
    trainer = L.Trainer(
        callbacks=[BF16Tail(0.5)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(UserError, match="bf16_tail: needs a PolicyModule, got BoringModel"):
        trainer.fit(BoringModel())


# --- what each declares -----------------------------------------------------------------------


def test_forward_quantization_quantizes_both_operands_of_the_decoder():
    rows = table(ForwardQuantization("nvfp4", outer_scale="row"))
    wanted = get_format("nvfp4", outer_scale="row")
    assert quantized(rows) == rows.keys() - {"lm_head"}
    for layer in quantized(rows):
        assert rows[layer].train == rows[layer].rollout == LinearPrecision(wanted, wanted)


def test_forward_quantization_of_weight_and_activation_may_differ():
    callback = ForwardQuantization(
        "nvfp4",
        outer_scale="row",
        four_over_six="mae",
        weight={"outer_scale": "tensor"},
        activation={"format": "fp8_e4m3"},
    )
    row = table(callback)["model.layers.0.mlp.up_proj"]
    assert row.train is not None
    assert row.train.weight == get_format("nvfp4", outer_scale="tensor", four_over_six="mae")
    assert row.train.activation == get_format("fp8_e4m3")  # no option of nvfp4 reaches it


def test_forward_quantization_of_one_operand():
    callback = ForwardQuantization("nvfp4", activation={"format": "bf16"})
    row = table(callback)["model.layers.0.mlp.up_proj"]
    assert row.train == LinearPrecision(NVFP4, get_format("bf16"))
    assert row.quantized


@pytest.mark.parametrize("format", ["nvfp4", "int4"])
@pytest.mark.parametrize("side", ["train", "rollout", "both"])
def test_forward_quantization_of_weights_alone_or_of_activations_alone(format, side):
    quantized_ = get_format(format)
    for off, expected in (
        ("activation", LinearPrecision(quantized_, None)),
        ("weight", LinearPrecision(None, quantized_)),
    ):
        row = table(ForwardQuantization(format, side=side, **{off: "none"}))[UP_PROJ]
        assert row.train == (None if side == "rollout" else expected)
        assert row.rollout == (None if side == "train" else expected)
        assert row.quantized


def test_forward_quantization_takes_blocks_as_yaml_has_them():
    yaml = "{format: nvfp4, weight: {block: [16, 16]}, activation: {outer_scale: row}}"
    row = table(ForwardQuantization(**OmegaConf.to_container(OmegaConf.create(yaml))))[UP_PROJ]
    assert row.train is not None
    assert row.train.weight == get_format("nvfp4", block=(16, 16))
    assert row.train.activation == get_format("nvfp4", outer_scale="row")
    yaml = "{format: int4, block: [1, 32], outer_scale: none, activation: none}"
    row = table(ForwardQuantization(**OmegaConf.to_container(OmegaConf.create(yaml))))[UP_PROJ]
    groups = get_format("int4", block=(1, 32), outer_scale="none")
    assert row.train == LinearPrecision(groups, None)


@pytest.mark.parametrize(
    ("where", "part"),
    [("mlp", ".mlp."), (["mlp"], ".mlp."), (["*.0.*", "*.0.mlp.*", "*.3.*"], (".0.", ".3."))],
)
def test_forward_quantization_where(where, part):
    rows = table(ForwardQuantization("nvfp4", where=where))
    parts = (part,) if isinstance(part, str) else part
    assert quantized(rows) == {layer for layer in rows if any(p in layer for p in parts)}


@pytest.mark.parametrize("side", ["train", "rollout"])
def test_forward_quantization_on_one_side(side):
    row = table(ForwardQuantization("nvfp4", side=side))["model.layers.0.mlp.up_proj"]
    assert (row.train is None, row.rollout is None) == (side == "rollout", side == "train")


@pytest.mark.parametrize("where", ["linears", "mlp"])
def test_dequantized_backward_sets_the_backward(where):
    forward = ForwardQuantization("nvfp4")
    rows = table(forward, DequantizedBackward(where))
    for layer in quantized(rows):
        inside = where == "linears" or ".mlp." in layer
        backward = "dequantized" if inside else "high_precision"
        assert rows[layer].train == LinearPrecision(NVFP4, NVFP4, backward=backward)
    assert not quantized(table(DequantizedBackward(where)))


@pytest.mark.parametrize("where", ["linears", "mlp"])
def test_quantized_backward_sets_backward_and_gradient(where):
    fp8 = get_format("fp8_e4m3", outer_scale="row")
    callback = QuantizedBackward("fp8_e4m3", where=where, outer_scale="row")
    rows = table(ForwardQuantization("nvfp4"), callback)
    for layer in quantized(rows):
        inside = where == "linears" or ".mlp." in layer
        rule = (fp8, "quantized") if inside else (None, "high_precision")
        assert rows[layer].train == LinearPrecision(NVFP4, NVFP4, *rule)
    assert not quantized(table(callback))


def test_quantized_backward_of_the_pretraining_recipe():
    square = {"block": [16, 16]}
    callback = QuantizedBackward("nvfp4", rounding="stochastic", hadamard=16)
    rows = table(ForwardQuantization("nvfp4", weight=square), callback)
    gradient = get_format("nvfp4", rounding="stochastic", hadamard=16)
    weight = get_format("nvfp4", block=(16, 16))
    for layer in quantized(rows):
        assert rows[layer].train == LinearPrecision(weight, NVFP4, gradient, "quantized")


@pytest.mark.parametrize("off", ["weight", "activation"])
def test_quantized_backward_of_layers_with_one_quantized_operand(off):
    forward = ForwardQuantization("nvfp4", **{off: "none"})
    row = table(forward, QuantizedBackward("mxfp8"))[UP_PROJ]
    formats = {"weight": NVFP4, "activation": NVFP4, off: None}
    assert row.train == LinearPrecision(
        **formats, gradient=get_format("mxfp8"), backward="quantized"
    )


def test_the_two_backwards_disagree_in_either_order():
    stack = [ForwardQuantization("nvfp4"), DequantizedBackward(), QuantizedBackward("nvfp4")]
    for order in (stack, stack[::-1]):
        with pytest.raises(UserError, match="dequantized_backward and quantized_backward disagree"):
            table(*order)


@pytest.mark.parametrize(("fraction", "first"), [(0, 4), (0.0, 4), (0.01, 3), (0.5, 2), (1, 0)])
def test_bf16_tail_keeps_the_last_layers(fraction, first):
    rows = table(ForwardQuantization("nvfp4"), BF16Tail(fraction))
    tail = {layer for layer in rows if layer != "lm_head" and int(layer.split(".")[2]) >= first}
    assert {layer for layer, row in rows.items() if row.kept_by == ("bf16_tail",)} == tail
    assert all(rows[layer].train == rows[layer].rollout == BF16 for layer in tail)
    assert quantized(rows) == rows.keys() - tail - {"lm_head"}


@pytest.mark.parametrize("select", ["*.v_proj", ["*.v_proj"], ["*.0.*.v_proj", "*.v_proj"]])
def test_sensitive_weights_keeps_what_it_selects(select):
    rows = table(ForwardQuantization("nvfp4"), SensitiveWeights(select))
    kept = {layer for layer in rows if layer.endswith("v_proj")}
    assert len(kept) == LAYERS
    assert {layer for layer, row in rows.items() if row.kept_by} == kept
    assert all(rows[layer].train == rows[layer].rollout == BF16 for layer in kept)


def test_no_decay_on_quantized_exempts_what_is_quantized():
    forward = ForwardQuantization("nvfp4", where="mlp")
    rows = table(forward, NoDecayOnQuantized(), BF16Tail(0.25))
    assert {layer for layer, row in rows.items() if not row.weight_decay} == quantized(rows)
    assert len(quantized(rows)) == 3 * (LAYERS - 1)
    assert all(row.weight_decay for row in table(forward).values())
    assert all(row.weight_decay for row in table(NoDecayOnQuantized()).values())


# --- what each refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ForwardQuantization("nvpf4"), "'nvpf4'; did you mean 'nvfp4'"),
        (lambda: ForwardQuantization("nvfp4", outer_scael="row"), "did you mean 'outer_scale'"),
        (lambda: ForwardQuantization("nvfp4", outer_scale="rows"), "outer_scale='rows'"),
        (lambda: ForwardQuantization("nvfp4", weight={"outer_scale": "rows"}), "'rows'"),
        (lambda: ForwardQuantization("nvfp4", weight={"format": "mxpf8"}), "did you mean 'mxfp8'"),
        (lambda: ForwardQuantization("nvfp4", activation={"format": 8}), "format '8'"),
        (lambda: ForwardQuantization("bf16", activation={"outer_scale": "row"}), "it has none"),
        (lambda: ForwardQuantization("nvfp4", where=[]), "where selects nothing"),
        (lambda: ForwardQuantization("nvfp4", side="trian"), "side must be .*'trian'"),
        (lambda: ForwardQuantization("nvfp4", weight="none", activation="none"), "both none"),
        (lambda: ForwardQuantization("nvfp4", block=[8, 8]), r"block=\(8, 8\) is not \[1, 16\]"),
        (
            lambda: ForwardQuantization("nvfp4", outer_scale="row", block=[16, 16]),
            r"block=\[16, 16\] spans rows",
        ),
        (lambda: ForwardQuantization("int4", block=[1, 32]), "set outer_scale=none"),
        (lambda: ForwardQuantization("int4", block=32, outer_scale="none"), r"is not \[1, N\]"),
        (
            lambda: ForwardQuantization("nvfp4", four_over_six="mae", rounding="stochastic"),
            "set rounding=nearest",
        ),
        (lambda: QuantizedBackward("nvfp4", rounding="stochastc"), "did you mean 'stochastic'"),
        (lambda: QuantizedBackward("nvfp4", hadamard=8), "hadamard=8 is not none, 16, 32"),
        (lambda: QuantizedBackward("bf16", hadamard=16), "no option 'hadamard'"),
        (lambda: QuantizedBackward("fp8"), "'fp8'; did you mean 'fp8_e4m3'|known: .*fp8_e4m3"),
        (lambda: QuantizedBackward("nvfp4", scale_rule="floor"), "no option 'scale_rule'"),
        (lambda: BF16Tail(1.5), "fraction must be 0 to 1, got 1.5"),
        (lambda: BF16Tail(-0.1), "fraction must be 0 to 1, got -0.1"),
        (lambda: SensitiveWeights([]), "select names no layer"),
    ],
)
def test_bad_arguments_are_one_line(make, says):
    with pytest.raises(ValueError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "callback",
    [
        ForwardQuantization("nvfp4", where=["mlp", "*.q_porj"]),
        DequantizedBackward("*.q_porj"),
        FP16("*.q_porj"),
        FP32LmHead("*.q_porj"),
        QuantizedBackward("nvfp4", where="*.q_porj"),
        SensitiveWeights(["*.q_proj", "*.q_porj"]),
    ],
    ids=lambda callback: callback.handle,
)
def test_a_selector_that_matches_nothing_names_the_callback(callback):
    with pytest.raises(UserError, match=rf"^{callback.handle}: selector '\*\.q_porj' .*q_proj"):
        table(ForwardQuantization("nvfp4"), callback)
