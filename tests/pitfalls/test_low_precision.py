"""Low-precision numerics: faults that users met elsewhere, each right here.

The numbers are those of the list that the tests follow; each docstring links to the report. No
rows of it: 27, 28, 30 and 33. Not here: 37, routes that an engine returns for replay, since no
engine replays routes. Of 36 the engines of their own process (vLLM, SGLang) are still to come.
"""

import copy

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from lightning_qrl.errors import UserError
from lightning_qrl.formats import format_names, get_format
from lightning_qrl.policy import Policy
from lightning_qrl.precision import LinearPrecision, PrecisionPlan, QuantLinear
from lightning_qrl.precision.sides import SideSwitch
from lightning_qrl.recipe import load_recipe, recipe_names

FORMATS = [get_format(name) for name in format_names()]
ROW = get_format("nvfp4", outer_scale="row", four_over_six="mae")
MORE = [get_format("nvfp4", outer_scale="none"), ROW, get_format("fp8_e4m3", outer_scale="row")]
every_format = pytest.mark.parametrize("fmt", [*FORMATS, *MORE], ids=str)


def layer_of(format, backward="high_precision", inputs=37, outputs=23):
    torch.manual_seed(0)
    precision = LinearPrecision(format, format, format, backward)
    return QuantLinear.from_linear(nn.Linear(inputs, outputs), precision, precision, SideSwitch())


@every_format
def test_row_23_zeros_quantize_to_zeros_with_finite_scales(fmt):
    """https://github.com/pytorch/ao/issues/4713 ; padding rows are zeros, and 0/0 is NaN."""
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    rows[1] = 0
    rows[2, :32] = 0
    rows[3] = 1e-38
    for x in (rows, torch.zeros(3, 64), torch.full((2, 64), 1e-38), torch.zeros(1, 5)):
        stored = fmt.quantize(x)
        assert fmt.fake_quantize(x).isfinite().all()
        assert not fmt.fake_quantize(x)[x == 0].any()
        for scale in (stored.block_scale, stored.outer_scale):
            assert scale is None or scale.isfinite().all()


@every_format
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
def test_row_24_zero_activations_give_finite_gradients(fmt, backward):
    """https://github.com/pytorch/ao/issues/3356 ; NaN from the first step until a floor was set."""
    layer = layer_of(fmt, backward)
    for scale in (0.0, 1e-30):
        x = (scale * torch.randn(5, 37)).requires_grad_()
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()
        assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("outer_scale", ["tensor", "row", "none"])
@pytest.mark.parametrize("four_over_six", ["none", "mae", "mse"])
def test_row_25_no_block_scale_becomes_nan(outer_scale, four_over_six):
    """https://github.com/NVIDIA/Model-Optimizer/issues/1633 ; E4M3 has no infinity, only NaN."""
    fmt = get_format("nvfp4", outer_scale=outer_scale, four_over_six=four_over_six)
    largest = torch.finfo(torch.bfloat16).max
    beside = torch.zeros(2, 48)
    beside[0, 16:32], beside[1, 32:] = 1e4, largest
    for x in (beside, torch.full((2, 32), largest), torch.full((1, 16), 6.0 * 480)):
        stored = fmt.quantize(x)
        assert not ((stored.scale_codes & 0x7F) == 0x7F).any()  # E4M3's NaN
        values = fmt.fake_quantize(x)
        assert values.isfinite().all()
        assert not values[x == 0].any()


def test_row_26_nan_makes_its_blocks_scale_nan_and_scales_round_by_the_named_rule():
    """https://github.com/pytorch/ao/pull/4725 ; amax is never rounded to BF16 on its way."""
    x = torch.ones(1, 64)
    x[0, 3] = torch.nan
    for name in ("mxfp8", "mxfp4"):
        stored = get_format(name).quantize(x)
        assert stored.scale_codes.flatten().tolist()[0] == 0xFF
        assert stored.dequantize()[0, :32].isnan().all()
        assert stored.dequantize()[0, 32:].eq(1).all()
    exponents = {  # of the scale: amax just below 2, exactly 2, 448, just above
        "floor": [-8, -7, 0, 0],
        "ceil": [-7, -7, 1, 1],
        "rceil": [-7, -7, 0, 1],
        "even": [-7, -7, 0, 0],
    }
    just_below_2 = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
    above_448 = torch.nextafter(torch.tensor(448.0), torch.tensor(1e3))
    for rule, want in exponents.items():
        fmt = get_format("mxfp8", scale_rule=rule)
        for amax, exponent in zip((just_below_2, 2.0, 448.0, above_448), want, strict=True):
            scale = fmt.quantize(torch.full((1, 32), float(amax))).block_scale
            assert scale.flatten().tolist() == [2.0**exponent], (rule, float(amax))
    edges = torch.tensor([[2.0**-127], [2.0**127 * 1.5]]).expand(2, 32)
    scales = get_format("mxfp8").quantize(edges).scale_codes.flatten().tolist()
    assert scales == [0, 127 + 127 - 8]  # 2^-127 is the least: there is no zero


def test_row_29_a_pattern_means_whole_names_and_one_that_matches_nothing_is_an_error():
    """https://github.com/verl-project/verl/pull/7519 ; `mlp.gate` swallowed `gate_up_proj`."""

    def quantized(where):
        plan = PrecisionPlan()
        plan.quantize(where, by="here", weight=ROW, activation=ROW)
        plan.commit(tiny_model("qwen2_moe"))
        return [row.layer for row in plan.table() if row.quantized]

    for where in ("gate", "mlp.shared_expert_gate", "*.shared_expert_gat", "*.nothing"):
        with pytest.raises(UserError, match="matches no linear layer"):
            quantized(where)
    routers, experts = quantized("*.mlp.shared_expert_gate"), quantized("*.gate_up_proj")
    assert routers
    assert all(name.endswith(".mlp.shared_expert_gate") for name in routers)
    assert experts
    assert all(name.endswith(".gate_up_proj") for name in experts)
    assert not set(routers) & set(quantized("*.mlp.*"))


def test_row_31_the_type_of_a_scale_is_what_the_recipe_says():
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/3112 ; powers of two only if asked for."""
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    fine = get_format("fp8_e4m3", block=(1, 128), outer_scale="none")
    scale = fine.quantize(x).block_scale.flatten()
    torch.testing.assert_close(scale, x.abs().amax(dim=1) / 448)
    assert (scale.log2() % 1 != 0).all()
    coarse = get_format("mxfp8").quantize(x).block_scale
    assert (coarse.log2() % 1 == 0).all()
    said = [load_recipe(name).values["callbacks"].get("forward_quantization")
            for name in recipe_names()]  # fmt: skip
    assert all(given["format"] for given in said if given)
    options = {option.name for option in type(get_format("mxfp8")).options()}
    assert {"scale_rule", "block"} <= options


@pytest.mark.parametrize("fmt", [ROW, get_format("mxfp8"), get_format("int4")], ids=str)
def test_row_32_each_backward_takes_the_operands_that_its_name_says(fmt):
    """https://github.com/NVIDIA/TransformerEngine/pull/3141 ; it took the original ones."""
    g = torch.Generator().manual_seed(1)
    x, dy = torch.randn(6, 37, generator=g), torch.randn(6, 23, generator=g)
    for backward in ("dequantized", "high_precision"):
        layer, inputs = layer_of(fmt, backward), x.clone().requires_grad_()
        layer(inputs).backward(dy)
        if backward == "high_precision":
            assert torch.equal(inputs.grad, dy @ layer.weight)
            assert torch.equal(layer.weight.grad, dy.T @ x)
            continue
        w_hat, x_hat = (fmt.quantize(v).dequantize().double() for v in (layer.weight, x))
        for got, want, original in (
            (inputs.grad, dy.double() @ w_hat, dy @ layer.weight),
            (layer.weight.grad, dy.double().T @ x_hat, dy.T @ x),
        ):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
            assert (got - original).abs().max() > 1e-3


@every_format
def test_row_34_what_is_computed_with_is_what_is_stored_bit_for_bit(fmt):
    """https://github.com/pytorch/ao/pull/3050 ; fake and real quantization differed."""
    x = torch.randn(5, 77, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 77)
    assert torch.equal(fmt.fake_quantize(x), fmt.quantize(x).dequantize())


@every_format
def test_row_35_any_number_of_tokens_and_any_width(fmt):
    """https://github.com/NVIDIA-NeMo/RL/issues/1551 ; one token, odd lengths, no multiple of 16."""
    for shape in ((37,), (1, 37), (1, 1, 37), (3, 5, 37), (0, 37)):
        for inputs in (37, 1):
            layer = layer_of(fmt, "quantized", inputs=inputs)
            x = torch.randn(*shape[:-1], inputs, requires_grad=True)
            y = layer(x)
            y.sum().backward()
            assert y.shape == (*shape[:-1], 23)
            assert x.grad.shape == x.shape
            assert y.isfinite().all()


@pytest.mark.parametrize("fmt", [ROW, get_format("mxfp8"), get_format("mxfp4")], ids=str)
def test_row_35_padding_does_not_change_the_tokens(fmt):
    """https://github.com/NVIDIA/TransformerEngine/issues/2892 ; with a scale a row or a block."""
    layer = layer_of(fmt)
    tokens = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    for padding in (torch.zeros(3, 37), torch.full((3, 37), 1e4)):
        padded = layer(torch.cat([tokens, padding]))[:5]
        torch.testing.assert_close(padded, layer(tokens), rtol=1e-5, atol=1e-5)


def test_row_35c_a_tied_head_stays_tied_and_out_of_it_unless_named(save_policy, tmp_path):
    """https://github.com/huggingface/transformers/pull/37905 ; and then the table says it."""
    save_policy(tmp_path, tie_word_embeddings=True)
    for where in (["linears"], ["linears", "lm_head"]):
        model, plan = Policy(str(tmp_path)).build(), PrecisionPlan()
        for one in where:
            plan.quantize(one, by="here", weight=ROW, activation=ROW)
        plan.commit(model)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert type(model.get_input_embeddings()) is nn.Embedding
        rows = {row.layer: row for row in plan.table()}
        assert rows["lm_head"].quantized == ("lm_head" in where)
        assert rows["lm_head"].note == "weight tied to the embedding"
        assert sum(row.quantized for row in rows.values()) == 14 + ("lm_head" in where)


def test_row_36_after_each_update_the_sampler_computes_with_the_new_weights(tiny_policy):
    """https://github.com/verl-project/verl/issues/7136 ; it kept stale scales, its KL 25-fold."""
    ids = torch.tensor([[4, 5, 6, 7]])

    def committed(model):
        plan = PrecisionPlan()
        plan.quantize("linears", by="here", weight=ROW, activation=ROW)
        plan.commit(model)
        return plan

    model = tiny_policy.build().eval()
    plan, outputs = committed(model), []
    for update in range(3):
        with torch.no_grad(), plan.sampling():
            outputs.append(model(input_ids=ids).logits)
            again = model(input_ids=ids).logits
            fresh = tiny_policy.build().eval()
            fresh.load_state_dict(copy.deepcopy(model.state_dict()))
            with committed(fresh).sampling():
                assert torch.equal(outputs[-1], fresh(input_ids=ids).logits)
            assert torch.equal(outputs[-1], again)
        for module in (m for m in model.modules() if isinstance(m, QuantLinear)):
            used = module.precision["rollout"].weight.fake_quantize(module.weight)
            assert (used - module.weight).norm() < 0.15 * module.weight.norm()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.5 * (update + 1) * torch.rand_like(p))
    assert (outputs[1] - outputs[0]).abs().max() > 0.1
    assert (outputs[2] - outputs[1]).abs().max() > 0.1
