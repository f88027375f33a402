"""Fused experts against a loop over plain linear layers, one an expert, bit for bit.

The oracle is transformers' own loop, written out with `QuantLinear` or `nn.Linear` modules that
hold copies of the slices: neither fused parameters nor our two implementations take part.

N tokens, K experts a token, E experts, H hidden, F expert's width, S tokens of one expert.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, NemotronHConfig, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from lightning_qrl.errors import UserError
from lightning_qrl.formats import get_format
from lightning_qrl.formats.nvfp4 import NVFP4
from lightning_qrl.precision import LinearPrecision, PrecisionPlan, QuantLinear
from lightning_qrl.precision.experts import expert_weights, quantize_experts
from lightning_qrl.precision.linear import SideSwitch

N, K, E, H, F = 23, 2, 6, 40, 24
UNUSED = 4  # the expert that gets no token

NVFP4_TENSOR = get_format("nvfp4", four_over_six="mae")
NVFP4_ROW = get_format("nvfp4", outer_scale="row", four_over_six="mae")
FP8 = get_format("fp8_e4m3")
PRECISIONS = {
    "none": LinearPrecision(),
    "4bitter": LinearPrecision(NVFP4_TENSOR, NVFP4_ROW, backward="dequantized"),
    "per tensor": LinearPrecision(NVFP4_TENSOR, NVFP4_TENSOR, backward="dequantized"),
    "weight alone": LinearPrecision(NVFP4_TENSOR, None, backward="high_precision"),
    "quantized": LinearPrecision(FP8, FP8, FP8, backward="quantized"),
}
each_precision = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
each_path = pytest.mark.parametrize("path", ["eager", "grouped_mm", "batched_mm"])


def qwen2_moe_experts():
    return Qwen2MoeExperts(
        Qwen2MoeConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E, hidden_act="silu")
    )


def gpt_oss_experts():
    """Transposed, with biases, gate and up interleaved, with a gate of its own."""
    return GptOssExperts(GptOssConfig(hidden_size=H, intermediate_size=F, num_local_experts=E))


def nemotron_h_experts():
    """Without a gate."""
    return NemotronHExperts(
        NemotronHConfig(hidden_size=H, moe_intermediate_size=F, n_routed_experts=E)
    )


KINDS = [qwen2_moe_experts, gpt_oss_experts, nemotron_h_experts]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def make(kind, path):
    torch.manual_seed(0)
    experts = kind()
    experts.config._experts_implementation = path
    with torch.no_grad():
        for parameter in experts.parameters():
            # experts of different size, or their outer scales would be all alike
            spread = torch.logspace(-2, 1, E).view(E, *[1] * (parameter.ndim - 1))
            parameter.copy_(torch.randn_like(parameter) * spread)
    return experts


def inputs(tokens=N, dtype=torch.float32):
    torch.manual_seed(1)
    hidden_NH = torch.randn(tokens, H) * torch.logspace(-1, 1, max(tokens, 1))[:tokens, None]
    chosen = [pair for pair in itertools.permutations(range(E), K) if UNUSED not in pair]
    pairs = [chosen[(7 * i) % len(chosen)] for i in range(tokens)]
    chosen_NK = torch.tensor(pairs, dtype=torch.int64)
    share_NK = torch.rand(tokens, K)
    return hidden_NH.to(dtype), chosen_NK.view(tokens, K), share_NK, torch.randn(tokens, H)


def quantize(experts, precision, switch=None, sides=("train", "rollout")):
    rule = {side: precision if side in sides else None for side in ("train", "rollout")}
    every = dict.fromkeys(expert_weights(experts), rule)
    quantize_experts(experts, every, switch or SideSwitch())
    return experts


def run(forward, modules, hidden_NH, chosen_NK, share_NK, dy_NH):
    """Output and all gradients of one pass."""
    hidden_NH = hidden_NH.clone().requires_grad_()
    share_NK = share_NK.clone().requires_grad_()
    modules.zero_grad()
    y_NH = forward(hidden_NH, chosen_NK, share_NK)
    y_NH.backward(dy_NH.to(y_NH.dtype))
    return [y_NH.detach(), hidden_NH.grad, share_NK.grad, *(p.grad for p in modules.parameters())]


class Loop(nn.Module):
    """The same experts as 2 E linear layers, and the loop over them of transformers."""

    def __init__(self, experts, precision, sort):
        super().__init__()
        self.sort = sort
        self.act = [experts.act_fn] if not experts.has_gate else [experts._apply_gate]
        self.up, self.down = (
            nn.ModuleList(self.linear(experts, name, e, precision) for e in range(E))
            for name in expert_weights(experts)
        )

    @staticmethod
    def linear(experts, name, e, precision):
        weight_OI = getattr(experts, name)[e].detach()
        weight_OI = (weight_OI.T if experts.is_transposed else weight_OI).clone()
        linear = nn.Linear(*weight_OI.T.shape, bias=experts.has_bias)
        linear.weight = nn.Parameter(weight_OI)
        if experts.has_bias:
            linear.bias = nn.Parameter(getattr(experts, f"{name}_bias")[e].detach().clone())
        return QuantLinear.from_linear(linear, precision, precision, SideSwitch())

    def forward(self, hidden_NH, chosen_NK, share_NK):
        y_NKH = torch.zeros(*chosen_NK.shape, H)
        for e in range(E):
            if self.sort:  # the order of tokens that a sum over them is taken in
                token_S, slot_S = torch.where(chosen_NK == e)
            else:
                slot_S, token_S = torch.where(torch.eq(chosen_NK.T, e))
            y_SH = self.down[e](self.act[0](self.up[e](hidden_NH[token_S])))
            y_NKH = y_NKH.index_put(
                (token_S, slot_S), (y_SH * share_NK[token_S, slot_S, None]).float()
            )
        return y_NKH.sum(dim=1).to(hidden_NH.dtype)

    def fused(self, grads, transposed):
        """Gradients of the layers as those of the fused parameters."""
        by_name = dict(zip((n for n, _ in self.named_parameters()), grads, strict=True))
        for half, kind in itertools.product(("up", "down"), ("weight", "bias")):
            found = [g for n, g in by_name.items() if n.startswith(half) and n.endswith(kind)]
            if found:
                stacked = torch.stack(found)
                yield stacked.mT if transposed and kind == "weight" else stacked


@each_kind
@each_path
@each_precision
def test_experts_are_a_loop_over_linears(kind, path, precision):
    experts = quantize(make(kind, path), precision)
    loop = Loop(experts, precision, sort=path != "eager")
    y, dx, dshare, *grads = run(experts, experts, *inputs())
    expected_y, expected_dx, expected_dshare, *expected = run(loop, loop, *inputs())
    assert y.equal(expected_y)
    assert dx.equal(expected_dx)
    assert dshare.equal(expected_dshare)
    names = [name for name, _ in experts.named_parameters()]
    order = sorted(range(len(names)), key=lambda i: ("down" in names[i], "bias" in names[i]))
    for i, wanted in zip(order, loop.fused(expected, experts.is_transposed), strict=True):
        assert grads[i].equal(wanted), names[i]
        assert grads[i][UNUSED].count_nonzero() == 0
        assert grads[i][0].count_nonzero() > 0


@pytest.fixture
def one_thread():
    """transformers' batched path adds up gradients in an order that depends on the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@each_path
@pytest.mark.parametrize("side", ["train", "rollout"])
@pytest.mark.usefixtures("one_thread")
def test_without_precision_the_models_own_runs(path, side):
    own = make(qwen2_moe_experts, path)
    other = "rollout" if side == "train" else "train"
    ours = quantize(copy.deepcopy(own), PRECISIONS["4bitter"], SideSwitch(side), sides=[other])
    for mine, theirs in zip(run(ours, ours, *inputs()), run(own, own, *inputs()), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("kind", [qwen2_moe_experts, gpt_oss_experts], ids=["qwen", "gpt_oss"])
@pytest.mark.parametrize("path", ["eager", "grouped_mm"])
def test_precision_that_rounds_nothing_is_transformers_own(kind, path):
    own = make(kind, path)
    ours = quantize(copy.deepcopy(own), LinearPrecision())
    for mine, theirs in zip(run(ours, ours, *inputs()), run(own, own, *inputs()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_one_weight_alone_may_be_quantized():
    experts, whole = make(qwen2_moe_experts, "grouped_mm"), make(qwen2_moe_experts, "grouped_mm")
    rule = dict.fromkeys(("train", "rollout"), PRECISIONS["weight alone"])
    quantize_experts(experts, {"down_proj": rule}, SideSwitch())
    with torch.no_grad():  # the same weights, rounded by hand
        for slice_OI in whole.down_proj:
            slice_OI.copy_(NVFP4_TENSOR.quantize(slice_OI).dequantize())
    hidden_NH, chosen_NK, share_NK, _ = inputs()
    y_NH, wanted_NH = experts(hidden_NH, chosen_NK, share_NK), whole(hidden_NH, chosen_NK, share_NK)
    torch.testing.assert_close(y_NH, wanted_NH, rtol=1e-5, atol=1e-5 * wanted_NH.abs().max().item())


@each_path
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "quantized"])
def test_one_token_and_no_token(path, tokens, backward):
    precision = LinearPrecision(NVFP4_TENSOR, NVFP4_ROW, FP8, backward)
    experts = quantize(make(qwen2_moe_experts, path), precision)
    y, dx, dshare, *grads = run(experts, experts, *inputs(tokens))
    assert (y.shape, dx.shape, dshare.shape) == ((tokens, H), (tokens, H), (tokens, K))
    for grad in grads:  # of 2 experts; zeros, not None, of all others
        assert int(grad.flatten(1).any(dim=1).sum()) == K * tokens


@each_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype(path, dtype):
    """As a loop over linears does under the same autocast."""
    precision = PRECISIONS["4bitter"]
    experts = quantize(make(qwen2_moe_experts, path), precision)
    loop = Loop(experts, precision, sort=path != "eager")
    hidden_NH, chosen_NK, share_NK, _ = inputs()
    with torch.autocast("cpu", dtype):
        seen = []
        experts.act_fn.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
        y_NH, wanted_NH = (module(hidden_NH, chosen_NK, share_NK) for module in (experts, loop))
    assert set(seen) == {dtype}
    assert y_NH.dtype == torch.float32
    if path != "eager":  # which adds up in another order
        assert y_NH.equal(wanted_NH)
    torch.testing.assert_close(y_NH, wanted_NH, rtol=1e-2, atol=1e-2)


def test_an_experts_rows_do_not_depend_on_other_tokens():
    """One outer scale an expert, not one for all experts; with scales a row, one a token too."""
    experts = quantize(make(qwen2_moe_experts, "grouped_mm"), PRECISIONS["4bitter"])
    hidden_NH, chosen_NK, share_NK, _ = inputs()
    before_NH = experts(hidden_NH, chosen_NK, share_NK)
    with torch.no_grad():
        experts.gate_up_proj[UNUSED] *= 1e6
    loud_NH = torch.cat([hidden_NH[:1] * 1e4, hidden_NH[1:]])
    assert experts(loud_NH, chosen_NK, share_NK)[1:].equal(before_NH[1:])


class Counted(NVFP4):
    """NVFP4 that remembers the shapes of what it quantizes."""

    calls: list[tuple[int, ...]] = []

    def operand(self, x, generator=None):
        self.calls.append(tuple(x.shape))
        return NVFP4.operand(self, x, generator)


@each_path
def test_while_weights_stand_still_each_experts_is_quantized_once(path):
    switch = SideSwitch(holds=True)
    experts = make(qwen2_moe_experts, path)
    quantize(experts, LinearPrecision(Counted(), None), switch)
    hidden_NH, chosen_NK, share_NK, _ = inputs()
    Counted.calls.clear()
    with torch.no_grad():
        first_NH = experts(hidden_NH, chosen_NK, share_NK)
        assert sorted(Counted.calls) == [(H, F)] * (E - 1) + [(2 * F, H)] * (E - 1)
        assert experts(hidden_NH, chosen_NK, share_NK).equal(first_NH)
        assert len(Counted.calls) == 2 * (E - 1)
        switch.holds = False
        assert experts(hidden_NH, chosen_NK, share_NK).equal(first_NH)
    assert len(Counted.calls) == 4 * (E - 1)


# --- in a model -------------------------------------------------------------------------------

IDS = torch.arange(10).view(2, 5)


def small_model(path="grouped_mm", device="cpu"):
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, experts_implementation=path,
    )  # fmt: skip
    with torch.device(device):
        return Qwen2MoeForCausalLM(config)


def committed(model, where, **fields):
    plan = PrecisionPlan()
    plan.quantize(where, by="forward", **fields)
    plan.commit(model)
    return plan


@pytest.mark.parametrize("path", ["eager", "grouped_mm"])
def test_a_plan_reaches_the_experts_it_means_and_no_others(path):
    model, plain = small_model(path), small_model(path)
    before, names = dict(model.named_parameters()), list(model.state_dict())
    classes = {name: type(module) for name, module in model.named_modules()}
    plan = committed(model, "*.layers.1.*experts*", weight=NVFP4_TENSOR, activation=NVFP4_ROW)
    assert list(model.state_dict()) == names
    assert all(p is before[name] for name, p in model.named_parameters())
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert model.config._experts_implementation == path
    assert model.model.layers[0].mlp.experts.config is model.config
    assert [row.layer for row in plan.table() if row.quantized] == [
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_proj",
    ]
    for layers in (model.model.layers, plain.model.layers):
        assert layers[0].mlp.experts.gate_up_proj.equal(
            plain.model.layers[0].mlp.experts.gate_up_proj
        )
    assert not model(input_ids=IDS).logits.equal(plain(input_ids=IDS).logits)
    x, i, w = torch.randn(3, 32), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    own, ours = (m.model.layers[0].mlp.experts(x, i, w) for m in (plain, model))
    assert ours.equal(own)


def test_a_copy_of_a_model_is_quantized_like_the_model():
    model = small_model()
    plan = committed(model, "experts", side="rollout", weight=NVFP4_TENSOR)
    twin = copy.deepcopy(model)
    plain = small_model()(input_ids=IDS).logits
    with torch.no_grad(), plan.sampling():
        sampled = model(input_ids=IDS).logits
        assert twin(input_ids=IDS).logits.equal(sampled)
        assert not sampled.equal(plain)
    assert twin(input_ids=IDS).logits.equal(plain)


def test_training_and_evaluation_mode_are_one_forward():
    model = small_model()
    committed(model, "experts", weight=NVFP4_TENSOR, activation=NVFP4_ROW)
    assert model.train()(input_ids=IDS).logits.equal(model.eval()(input_ids=IDS).logits)


class LocalExperts(nn.Module):
    """Fused experts that transformers' registry does not know."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 32, 32))


def test_experts_of_an_unknown_kind_are_refused_when_meant():
    model = small_model()
    model.model.layers[1].mlp.experts = LocalExperts()
    with pytest.raises(UserError, match="model.layers.1.mlp.experts.gate_up_proj cannot be"):
        committed(model, "linears", weight=NVFP4_TENSOR)
    committed(model, "attention", weight=NVFP4_TENSOR)


def test_experts_spread_over_devices_are_refused():
    model = small_model()
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(UserError, match="layers.0.mlp.experts.* spread over devices"):
        committed(model, "experts", weight=NVFP4_TENSOR)
