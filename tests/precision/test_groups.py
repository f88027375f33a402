"""Layer groups: the parts of a policy, and selectors that mean them."""

import pytest

from lightning_qrl.policy import Policy
from lightning_qrl.precision.groups import find_groups, place_and_kind, weight_of
from lightning_qrl.precision.select import find_linears, select


@pytest.fixture(scope="module")
def skeleton():
    return Policy("embedded").skeleton()


def test_the_groups_of_the_embedded_policy(skeleton):
    linears = find_linears(skeleton)
    groups = {g.name: g for g in find_groups(linears, linears.decoder)}
    assert {"attention", "mlp", "first 15%", "last 15%", "layer 3", "mlp.up_proj"} <= groups.keys()
    assert "layer 0" not in groups  # the same layers as the first 15%
    assert "layer 7" not in groups
    assert groups["last 15%"].select == ("model.layers.7.*",)
    assert groups["first 25%"].select == ("model.layers.0.*", "model.layers.1.*")
    assert len(groups["mlp.up_proj"].layers) == 8
    for group in groups.values():
        meant = frozenset().union(*(select(selector, linears) for selector in group.select))
        assert meant == group.layers
    everything = frozenset(linears.decoder)
    assert all(group.layers < everything for group in groups.values())
    assert len({group.layers for group in groups.values()}) == len(groups)


def test_only_what_matters_is_in_a_group(skeleton):
    linears = find_linears(skeleton)
    among = {name for name in linears.decoder if "mlp" in name} | {"lm_head"}
    groups = {g.name: g for g in find_groups(linears, among)}
    assert groups["lm_head"].layers == {"lm_head"}
    assert "attention" not in groups
    assert groups["mlp"].layers == among - {"lm_head"}
    assert all(group.layers <= among for group in groups.values())
    assert find_groups(linears, ["model.layers.0.mlp.up_proj"]) == []


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.layers.3.self_attn.q_proj", 3, "self_attn.q_proj"),
        ("model.layers.3.mlp.experts.3.up_proj", 3, "mlp.experts.*.up_proj"),
        ("model.layers.0.mlp.experts.gate_up_proj", 0, "mlp.experts.gate_up_proj"),
    ],
)
def test_place_and_kind(name, layer, kind):
    assert place_and_kind(name, layer) == ("model.layers", kind)


def test_the_weight_of_a_layer_or_of_a_fused_parameter(skeleton):
    layer = "model.layers.0.mlp.up_proj"
    assert weight_of(skeleton, layer) is skeleton.get_submodule(layer).weight
    fused = "model.embed_tokens.weight"
    assert weight_of(skeleton, fused) is skeleton.get_parameter(fused)
