"""The precision plan: rules in any order become one table, and the table becomes layers."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from lightning_qrl.errors import UserError
from lightning_qrl.formats import get_format
from lightning_qrl.formats.nvfp4 import NVFP4
from lightning_qrl.precision import LinearPrecision, PrecisionPlan, QuantLinear
from lightning_qrl.precision.full import FP32
from lightning_qrl.precision.resolve import BF16
from lightning_qrl.precision.select import LastFraction

NVFP4_ROW = get_format("nvfp4", outer_scale="row")
FP8 = get_format("fp8_e4m3")
LINEARS_A_LAYER = 7


def quantize(plan, where="linears", by="forward", format=NVFP4_ROW, side="both"):
    plan.quantize(where, by=by, side=side, weight=format, activation=format)


def committed(model, *rules):
    plan = PrecisionPlan()
    for rule in rules:
        rule(plan)
    plan.commit(model)
    return plan


def rows_by_layer(plan):
    return {row.layer: row for row in plan.table()}


# --- what a rule means ------------------------------------------------------------------------


def test_an_empty_plan_leaves_the_model_alone(llama):
    model = llama(layers=2)
    before = dict(model.named_modules())
    plan = committed(model)
    assert all(module is before[name] for name, module in model.named_modules())
    assert [row.layer for row in plan.table()] == [
        name for name, module in before.items() if isinstance(module, nn.Linear)
    ]
    assert not any(row.quantized or row.kept_by or row.train or row.rollout for row in plan.table())
    assert all(row.weight_decay for row in plan.table())
    assert plan.count_quantized() == 0
    assert plan.count_kept() == 15
    assert plan.summary() == "none of 15 linears below 16 bits"


def test_quantize_sets_fields(llama):
    model = llama(layers=2)
    plan = committed(
        model,
        quantize,
        lambda p: p.quantize("mlp", by="b", backward="quantized", gradient=FP8),
    )
    for name, row in rows_by_layer(plan).items():
        if ".mlp." in name:
            assert row.train == LinearPrecision(NVFP4_ROW, NVFP4_ROW, FP8, "quantized")
        elif ".self_attn." in name:
            assert row.train == LinearPrecision(NVFP4_ROW, NVFP4_ROW)
        else:
            assert (name, row.train) == ("lm_head", None)
        assert row.rollout == row.train
    row = rows_by_layer(plan)["model.layers.0.mlp.up_proj"]
    assert row.shape == (48, 32)
    assert plan.count_quantized() == 14
    assert plan.count_kept() == 1
    assert plan.summary() == "nvfp4 forward on 14 of 15 linears"


@pytest.mark.parametrize("side", ["train", "rollout", "both"])
def test_a_rule_holds_on_its_side(llama, side):
    model = llama(layers=1)
    plan = committed(model, lambda p: quantize(p, side=side))
    row = rows_by_layer(plan)["model.layers.0.mlp.up_proj"]
    wanted = LinearPrecision(NVFP4_ROW, NVFP4_ROW)
    assert row.train == (None if side == "rollout" else wanted)
    assert row.rollout == (None if side == "train" else wanted)
    assert row.quantized
    assert model.get_submodule(row.layer).precision == {"train": row.train, "rollout": row.rollout}


def test_the_sides_may_differ(llama):
    plan = committed(
        llama(layers=1),
        lambda p: quantize(p, format=FP8, side="train"),
        lambda p: quantize(p, by="sampler", side="rollout"),
    )
    row = rows_by_layer(plan)["model.layers.0.mlp.up_proj"]
    assert row.train == LinearPrecision(FP8, FP8)
    assert row.rollout == LinearPrecision(NVFP4_ROW, NVFP4_ROW)
    assert plan.summary() == "fp8_e4m3/nvfp4 forward on 7 of 8 linears"


def test_none_sets_nothing(llama):
    plan = committed(
        llama(layers=1),
        lambda p: p.quantize("linears", by="a", weight=FP8, activation=None),
        lambda p: p.quantize("linears", by="b", activation=NVFP4_ROW),
    )
    row = rows_by_layer(plan)["model.layers.0.mlp.up_proj"]
    assert row.train == LinearPrecision(FP8, NVFP4_ROW)


def test_a_backward_alone_quantizes_nothing(llama):
    model = llama(layers=1)
    plan = committed(model, lambda p: p.quantize("linears", by="b", backward="dequantized"))
    assert plan.count_quantized() == 0
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_keep_wins(llama):
    plan = committed(llama(), quantize, lambda p: p.keep(LastFraction(0.15), by="tail"))
    for name, row in rows_by_layer(plan).items():
        if name.startswith("model.layers.7."):
            assert (row.train, row.rollout, row.kept_by) == (BF16, BF16, ("tail",))
            assert not row.quantized
        elif name != "lm_head":
            assert row.quantized
            assert row.kept_by == ()
    assert plan.summary() == "nvfp4 forward on 49 of 57 linears, 7 kept by tail"
    assert plan.count_kept() == 8


def test_keepers_are_all_named(llama):
    plan = committed(
        llama(),
        quantize,
        lambda p: p.keep(LastFraction(0.15), by="tail"),
        lambda p: p.keep("*.v_proj", by="sensitive"),
        lambda p: p.keep("*.7.self_attn.v_proj", by="sensitive"),
    )
    rows = rows_by_layer(plan)
    assert rows["model.layers.7.self_attn.v_proj"].kept_by == ("sensitive", "tail")
    assert rows["model.layers.6.self_attn.v_proj"].kept_by == ("sensitive",)
    assert plan.summary() == (
        "nvfp4 forward on 42 of 57 linears, "
        "7 kept by sensitive, 1 kept by sensitive and tail, 6 kept by tail"
    )


def test_keep_changes_nothing_where_nothing_is_quantized(llama):
    def keep(plan):
        plan.keep("attention", by="keeper")

    alone = llama(layers=2)
    assert committed(alone, keep).table() == committed(llama(layers=2)).table()
    assert not any(isinstance(module, QuantLinear) for module in alone.modules())

    def mlp(plan):
        quantize(plan, "mlp")

    assert committed(llama(layers=2), mlp, keep).table() == committed(llama(layers=2), mlp).table()


def test_a_kept_layer_is_bf16_on_the_quantized_side_alone(llama):
    plan = committed(
        llama(layers=2),
        lambda p: quantize(p, side="rollout"),
        lambda p: p.keep("mlp", by="keeper"),
    )
    row = rows_by_layer(plan)["model.layers.0.mlp.up_proj"]
    assert (row.train, row.rollout) == (None, BF16)


def test_no_decay_is_for_quantized_weights(llama):
    plan = committed(
        llama(),
        quantize,
        lambda p: p.keep("attention", by="keeper"),
        PrecisionPlan.no_decay_on_quantized,
    )
    for row in plan.table():
        assert row.weight_decay == (not row.quantized)
    assert {row.weight_decay for row in plan.table()} == {True, False}


# --- the head ---------------------------------------------------------------------------------


def test_a_tied_head_says_so_and_stays_tied(llama):
    model = llama(layers=1, tied=True, device="cpu")
    plan = committed(model, quantize, lambda p: quantize(p, "lm_head", by="head"))
    rows = rows_by_layer(plan)
    assert [name for name, row in rows.items() if row.note] == ["lm_head"]
    assert "tied" in rows["lm_head"].note
    assert rows["lm_head"].quantized
    assert isinstance(model.lm_head, QuantLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.model.embed_tokens) is nn.Embedding


def test_an_untied_head_has_no_note_and_is_not_quantized_unasked(llama):
    plan = committed(llama(layers=1), quantize, lambda p: quantize(p, "*", by="all"))
    row = rows_by_layer(plan)["lm_head"]
    assert (row.note, row.quantized) == ("", False)


# --- experts ----------------------------------------------------------------------------------


def test_fused_experts_are_one_row_a_parameter(qwen2_moe):
    plan = committed(
        qwen2_moe, lambda p: quantize(p, "experts"), PrecisionPlan.no_decay_on_quantized
    )
    rows = rows_by_layer(plan)
    up = rows["model.layers.0.mlp.experts.gate_up_proj"]
    assert (up.shape, up.fused) == ((4, 32, 32), True)
    assert rows["model.layers.1.mlp.experts.down_proj"].shape == (4, 32, 16)
    assert rows["model.layers.1.mlp.shared_expert.down_proj"].shape == (32, 16)
    for name, row in rows.items():
        assert row.quantized == row.fused == (".experts." in name)
        assert row.weight_decay == (not row.fused)
        assert qwen2_moe.get_parameter(row.parameter).shape == torch.Size(row.shape)
    assert plan.summary() == "nvfp4 forward on 4 of 21 linears"


def test_keep_spares_experts(qwen2_moe):
    plan = committed(
        qwen2_moe,
        lambda p: quantize(p, "experts"),
        lambda p: p.keep(LastFraction(0.5), by="tail"),
    )
    rows = rows_by_layer(plan)
    assert rows["model.layers.0.mlp.experts.down_proj"].quantized
    kept = rows["model.layers.1.mlp.experts.down_proj"]
    assert (kept.train, kept.kept_by) == (BF16, ("tail",))
    assert plan.summary() == "nvfp4 forward on 2 of 21 linears, 2 kept by tail"


# --- errors -----------------------------------------------------------------------------------


def test_two_that_disagree_are_both_named(llama):
    rules = [
        lambda p: quantize(p, by="first"),
        lambda p: p.quantize("*.1.mlp.up_proj", by="second", weight=FP8),
    ]
    for order in itertools.permutations(rules):
        with pytest.raises(UserError) as error:
            committed(llama(layers=2), *order)
        assert str(error.value) == (
            "first and second disagree on the weight of model.layers.1.mlp.up_proj (train side): "
            "nvfp4(outer_scale=row) or fp8_e4m3; remove one of them"
        )


def test_two_backwards_disagree(llama):
    with pytest.raises(UserError, match="deq and quant disagree on the backward of model.layers.0"):
        committed(
            llama(layers=1),
            lambda p: p.quantize("mlp", by="quant", backward="quantized", gradient=FP8),
            lambda p: p.quantize("linears", by="deq", backward="dequantized"),
        )


def test_different_sides_and_layers_do_not_disagree(llama):
    committed(
        llama(layers=1),
        lambda p: quantize(p, by="a", side="train"),
        lambda p: quantize(p, by="b", format=FP8, side="rollout"),
    )
    committed(
        llama(layers=1),
        lambda p: quantize(p, "mlp", by="a"),
        lambda p: quantize(p, "attention", by="b", format=FP8),
    )


def test_the_same_twice_is_no_disagreement(llama):
    twice = committed(
        llama(layers=1), quantize, quantize, lambda p: quantize(p, "mlp", by="another")
    )
    assert twice.table() == committed(llama(layers=1), quantize).table()


@pytest.mark.parametrize("kept", [True, False])
def test_kept_in_fp32_on_both_sides_whether_or_not_anything_is_quantized(llama, kept):
    def head(plan):
        plan.keep("lm_head", by="head", at="fp32")

    plan = committed(llama(), head, *([quantize] if kept else []))
    row = rows_by_layer(plan)["lm_head"]
    assert row.train == row.rollout == FP32
    assert (row.kept_by, row.quantized, row.weight_decay) == (("head",), False, True)
    assert plan.summary().endswith(
        " linears, 1 kept by head" if kept else " 16 bits, 1 kept by head"
    )


def test_a_layer_in_fp16_is_not_kept_in_bf16(llama):
    half = partial(quantize, format=get_format("fp16"))
    for rules in ([half, keep_tail], [keep_tail, half]):
        with pytest.raises(UserError, match="tail keeps .* in bf16, and forward asks for fp16"):
            committed(llama(), *rules)

    def activation(plan):
        plan.quantize("linears", by="a", weight=NVFP4_ROW, activation=get_format("fp16"))

    plan = committed(llama(), activation, keep_tail)  # the weight is what is spared
    assert any(row.kept_by for row in plan.table())


def keep_tail(plan):
    plan.keep(LastFraction(0.5), by="tail")


def test_a_selector_that_matches_nothing_names_its_callback(llama):
    rules = [
        quantize,
        lambda p: p.keep("*.v_porj", by="sensitive_weights"),
        *(lambda p, i=i: p.keep(f"nothing{i}", by=f"z{i}") for i in range(9)),
    ]
    for order in (rules, rules[::-1]):  # the same error in every order
        with pytest.raises(UserError, match=r"^sensitive_weights: selector '\*\.v_porj' .*v_proj"):
            committed(llama(layers=1), *order)


def test_an_error_leaves_the_model_alone(llama):
    model = llama(layers=1)
    with pytest.raises(UserError):
        committed(model, quantize, lambda p: p.keep("nothing", by="keeper"))
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_conv1d_is_refused_not_passed_over(gpt2):
    with pytest.raises(ValueError, match="Conv1D"):
        committed(gpt2, quantize)
    assert [row.layer for row in committed(gpt2).table()] == ["lm_head"]  # nothing asked, no error


def test_rules_come_before_the_model(llama):
    plan = committed(llama(layers=1), quantize)
    quantize(plan)  # a callback's setup runs again for every stage
    with pytest.raises(AssertionError, match="committed"):
        plan.keep("mlp", by="late")
    with pytest.raises(AssertionError, match="committed"):
        plan.no_decay_on_quantized()
    with pytest.raises(AssertionError, match="not committed"):
        PrecisionPlan().table()


def test_misspelt_fields_and_sides_are_refused():
    with pytest.raises(AssertionError, match="weigth"):
        PrecisionPlan().quantize("mlp", by="a", weigth=FP8)
    with pytest.raises(AssertionError, match="trian"):
        PrecisionPlan().quantize("mlp", by="a", side="trian", weight=FP8)


# --- order and commitment ---------------------------------------------------------------------


def test_order_does_not_matter(llama):
    rules = [
        quantize,
        lambda p: p.quantize("mlp", by="backward", backward="quantized", gradient=FP8),
        lambda p: p.keep(LastFraction(0.5), by="tail"),
        lambda p: p.keep("*.v_proj", by="sensitive"),
        PrecisionPlan.no_decay_on_quantized,
    ]
    plans = [committed(llama(layers=2), *order) for order in itertools.permutations(rules)]
    assert all(plan.table() == plans[0].table() for plan in plans)
    assert all(plan.summary() == plans[0].summary() for plan in plans)


def test_committing_keeps_parameters_and_names(llama):
    model = llama(layers=2, tied=True, device="cpu")
    model.model.layers[0].mlp.eval()
    parameters, names = dict(model.named_parameters()), list(model.state_dict())
    plan = PrecisionPlan()
    quantize(plan)
    plan.commit(model)
    assert list(model.state_dict()) == names
    assert list(dict(model.named_parameters())) == list(parameters)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert not model.model.layers[0].mlp.up_proj.training
    assert model.model.layers[1].mlp.up_proj.training
    layers, table = dict(model.named_modules()), plan.table()
    plan.commit(model)
    assert plan.table() is table
    assert all(module is layers[name] for name, module in model.named_modules())


def test_weights_load_under_any_plan(llama):
    quantized, plain = llama(layers=1, device="cpu"), llama(layers=1, device="cpu")
    committed(quantized, quantize)
    with torch.no_grad():
        quantized.model.layers[0].mlp.up_proj.weight.mul_(3)
    plain.load_state_dict(quantized.state_dict(), strict=True)
    assert plain.model.layers[0].mlp.up_proj.weight.equal(
        quantized.model.layers[0].mlp.up_proj.weight
    )


# --- sampling ---------------------------------------------------------------------------------


class Counted(NVFP4):
    """NVFP4 that remembers the shapes of what it quantizes."""

    calls: list[tuple[int, ...]] = []

    def operand(self, x, generator=None):
        self.calls.append(tuple(x.shape))
        return NVFP4.operand(self, x, generator)


IDS = torch.arange(10).view(2, 5)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture
def sampled(llama):
    """A model whose weights alone are quantized, and its plan."""
    model = llama(layers=2, device="cpu")
    rule = {"weight": Counted(outer_scale="row")}
    plan = committed(model, lambda p: p.quantize("linears", by="forward", **rule))
    Counted.calls.clear()
    return model, plan


def test_sampling_quantizes_each_weight_once(sampled):
    model, plan = sampled
    with plan.sampling():
        first = logits(model)
        assert len(Counted.calls) == 2 * LINEARS_A_LAYER
        assert logits(model).equal(first)
        assert len(Counted.calls) == 2 * LINEARS_A_LAYER
    assert logits(model).equal(first)  # both sides have the same precision
    assert len(Counted.calls) == 4 * LINEARS_A_LAYER


def test_sampling_after_an_optimizer_step_sees_the_new_weights(sampled):
    model, plan = sampled
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with plan.sampling():
        before = logits(model)
    model(input_ids=IDS).logits.square().mean().backward()
    optimizer.step()  # in place
    with plan.sampling():
        after = logits(model)
    assert not after.equal(before)
    assert after.equal(logits(model))


def test_sampling_after_loading_sees_the_new_weights(sampled):
    model, plan = sampled
    saved = copy.deepcopy(model.state_dict())
    with plan.sampling():
        before = logits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    with plan.sampling():
        assert not logits(model).equal(before)
    model.load_state_dict(saved)
    with plan.sampling():
        assert logits(model).equal(before)


def test_an_exception_while_sampling_restores_the_train_side(llama):
    model = llama(layers=1, device="cpu")
    plan = committed(model, lambda p: quantize(p, side="rollout"))
    plain = logits(model)

    def fail():
        with plan.sampling():
            assert not logits(model).equal(plain)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert logits(model).equal(plain)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    with plan.sampling():  # nothing was left over from before the exception
        zeroed = logits(model)
    with plan.sampling():
        assert logits(model).equal(zeroed)
    assert not plain.equal(zeroed)


def test_the_train_side_alone_leaves_the_sampler_plain(llama):
    model = llama(layers=1, device="cpu")
    plain = logits(model)
    plan = committed(model, lambda p: quantize(p, side="train"))
    assert not logits(model).equal(plain)
    with plan.sampling():
        assert logits(model).equal(plain)
