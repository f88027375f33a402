"""Selectors: what they mean, what they must not swallow, and what a wrong one says."""

import pytest
from torch import nn

from lightning_qrl.precision.select import LastFraction, find_linears, select

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def mixture(layers=11, experts=3):
    """Names that a substring would confuse, and more experts than layers."""

    def block():
        mlp = nn.ModuleDict({"gate": nn.Linear(8, 4), "gate_up_proj": nn.Linear(8, 8)})
        mlp["experts"] = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        return nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": mlp})

    body = {"embed": nn.Embedding(4, 8), "layers": nn.ModuleList(block() for _ in range(layers))}
    return nn.ModuleDict({"model": nn.ModuleDict(body), "lm_head": nn.Linear(8, 4)})


def test_a_glob_is_anchored_at_both_ends():
    linears = find_linears(mixture())
    gates = {f"model.layers.{i}.mlp.gate" for i in range(11)}
    assert select("*.mlp.gate", linears) == gates  # and not gate_up_proj (verl#7519)
    assert select("*.mlp.gate_*", linears) == {f"{gate}_up_proj" for gate in gates}
    for part in ("mlp.gate", "gate", "model.layers.0.mlp", "*.mlp", "layers.*"):
        with pytest.raises(ValueError, match="matches no linear layer"):
            select(part, linears)


def test_a_glob_on_one_layer_spares_those_that_begin_alike():
    linears = find_linears(mixture())
    found = select("model.layers.1.*", linears)
    assert found
    assert all(name.startswith("model.layers.1.") for name in found)  # not layers.10
    assert select("model.layers.[01].mlp.gate", linears) == {
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    }
    assert select("model.layers.1?.mlp.gate", linears) == {"model.layers.10.mlp.gate"}
    assert select("model.layers.3.mlp.gate", linears) == {"model.layers.3.mlp.gate"}


def test_decoder_layers_are_the_outermost_list():
    linears = find_linears(mixture(layers=2, experts=5))  # the experts are the longer list
    assert linears.layers == 2
    assert len(linears.decoder) == 2 * 7
    assert linears.decoder["model.layers.1.mlp.experts.4"] == 1
    assert linears.others == {"lm_head"}
    assert select(LastFraction(0.5), linears) == select("model.layers.1.*", linears)


def test_a_model_without_decoder_layers_is_refused(gpt2):
    with pytest.raises(ValueError, match="Linear has no list of decoder layers"):
        find_linears(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel .*no nn.Linear.*Conv1D"):
        find_linears(gpt2)


def test_predicates(llama):
    linears = find_linears(llama(layers=3))
    attention = {f"model.layers.{i}.self_attn.{name}" for i in range(3) for name in ATTENTION}
    mlp = {f"model.layers.{i}.mlp.{name}" for i in range(3) for name in MLP}
    assert select("attention", linears) == attention
    assert select("mlp", linears) == mlp
    assert select("linears", linears) == attention | mlp
    assert select("*", linears) == attention | mlp
    with pytest.raises(ValueError, match="'shared_experts' matches no linear layer"):
        select("shared_experts", linears)


def routed(layers=range(2)):
    """The fused experts of the small Qwen2-MoE."""
    return {
        f"model.layers.{i}.mlp.experts.{n}" for i in layers for n in ("gate_up_proj", "down_proj")
    }


def test_experts_are_the_routed_ones(qwen2_moe):
    linears = find_linears(qwen2_moe)
    assert select("experts", linears) == routed()
    assert select("mlp", linears) == routed() | select("shared_experts", linears)
    assert select("linears", linears) == select("mlp", linears) | select("attention", linears)
    assert select("*.1.mlp.experts.*", linears) == routed([1])
    assert select("*.gate_up_proj", linears) == {n for n in routed() if n.endswith("gate_up_proj")}
    assert select(LastFraction(0.5), linears) >= routed([1])
    assert not select(LastFraction(0.5), linears) & routed([0])


def test_experts_in_a_list_are_the_routed_ones():
    linears = find_linears(mixture(layers=2, experts=3))
    lists = {f"model.layers.{i}.mlp.experts.{e}" for i in range(2) for e in range(3)}
    assert select("experts", linears) == lists
    assert select("mlp", linears) == lists | select("*.gate_up_proj", linears)


def test_routers_are_meant_by_their_own_name_alone(qwen2_moe):
    models = [find_linears(mixture(layers=2)), find_linears(qwen2_moe)]
    for linears, last in zip(models, ("gate", "shared_expert_gate"), strict=True):
        routers = {f"model.layers.{i}.mlp.{last}" for i in range(2)}
        for wide in ("linears", "mlp", "*", "*.mlp.*", "*gate*", "model*", LastFraction(1)):
            assert not routers & select(wide, linears), wide
        assert select(f"*.{last}", linears) == routers
        assert select(f"*.1.mlp.{last}", linears) == {f"model.layers.1.mlp.{last}"}
        assert select(f"model.layers.0.mlp.{last}", linears) == {f"model.layers.0.mlp.{last}"}


def test_a_router_within_a_router_is_one():
    layer = nn.ModuleDict({"router": nn.ModuleDict({"layer": nn.Linear(8, 4)})})
    layer["experts"] = nn.ModuleList([nn.Linear(8, 8)])
    linears = find_linears(nn.ModuleDict({"layers": nn.ModuleList([layer])}))
    assert select("linears", linears) == {"layers.0.experts.0"}
    assert select("*.router.*", linears) == {"layers.0.router.layer"}


def test_shared_experts_of_qwen2_moe(qwen2_moe):
    linears = find_linears(qwen2_moe)
    expected = {f"model.layers.{i}.mlp.shared_expert.{name}" for i in range(2) for name in MLP}
    assert select("shared_experts", linears) == expected  # without mlp.shared_expert_gate
    assert select("shared_experts", linears) < select("mlp", linears)


@pytest.mark.parametrize(
    ("fraction", "layers", "count"),
    [
        (0, 8, 0),
        (0.0, 8, 0),
        (1e-9, 8, 1),
        (0.15, 8, 1),  # 1.2
        (0.18, 8, 1),  # 1.44
        (0.19, 8, 2),  # 1.52
        (0.5, 3, 2),  # 1.5
        (0.15, 28, 4),  # 4.2
        (0.99, 8, 8),
        (1, 8, 8),
        (1.0, 1, 1),
    ],
)
def test_last_fraction_rounds_to_the_nearest_layer(llama, fraction, layers, count):
    where = LastFraction(fraction)
    assert where.count(layers) == count
    found = select(where, find_linears(llama(layers=layers)))
    last = range(layers - count, layers)
    assert {name.split(".")[2] for name in found} == {str(layer) for layer in last}
    assert len(found) == 7 * count


@pytest.mark.parametrize("fraction", [-0.01, 1.01, 15, float("nan")])
def test_last_fraction_is_a_fraction(fraction):
    with pytest.raises(ValueError, match=f"fraction must be 0 to 1, got {fraction}"):
        LastFraction(fraction)


def test_the_head_is_taken_by_its_exact_name_alone(llama):
    linears = find_linears(llama(layers=2))
    assert select("lm_head", linears) == {"lm_head"}
    for glob in ("lm_*", "*lm_head", "[l]m_head"):
        with pytest.raises(ValueError, match="did you mean 'lm_head'"):
            select(glob, linears)


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.norm", "*norm*", "*embed*"])
def test_embeddings_and_norms_cannot_be_selected(llama, name):
    with pytest.raises(ValueError, match="matches no linear layer"):
        select(name, find_linears(llama(layers=2)))


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("atention", "'attention'"),
        ("model.layers.0.mlp.gate_porj", "mlp.gate_proj'"),
        ("*.self_attn.v_porj", r"'model.layers.\*.self_attn.v_proj'"),
        ("0", r"try 'model.layers.\*.self_attn.q_proj'"),
        ("", r"try 'model.layers.\*.self_attn.q_proj'"),
    ],
)
def test_a_wrong_selector_gets_a_hint(llama, wrong, hint):
    linears = find_linears(llama())
    with pytest.raises(ValueError, match=f"{hint}") as error:
        select(wrong, linears)
    message = str(error.value)
    assert f"selector {wrong!r}" in message
    assert "\n" not in message
    assert len(message) < 200  # not the names of all layers
    suggested = message.rpartition("'")[0].rpartition("'")[2]
    assert select(suggested, linears)  # what it suggests works
