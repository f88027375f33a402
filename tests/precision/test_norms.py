"""Which norms feed the linear layers, on architectures that name and place them differently."""

import pytest
from tiny_models import SIZES, tiny_model
from transformers import Olmo2Config, Olmo2ForCausalLM

from callbacks.forward_quantization import ForwardQuantization
from lightning_qrl.policy import Policy
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.precision.norms import feeding_norms

PRE = ("input_layernorm", "post_attention_layernorm")
NAMES = {
    "qwen3": PRE,  # has norms of queries and keys besides
    "llama": PRE,
    "qwen2_moe": PRE,
    "olmoe": PRE,
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm"),  # and two after
    "lfm2": ("operator_norm", "ffn_norm"),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_norms_before_projections_and_no_other(name):
    model = tiny_model(name)
    found = feeding_norms(model)
    assert list(found) == [f"model.layers.{i}.{norm}" for i in range(2) for norm in NAMES[name]]
    assert all(weight is model.get_parameter(f"{n}.weight") for n, weight in found.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_norms_only_what_was_written_has_none():
    assert feeding_norms(Olmo2ForCausalLM(Olmo2Config(**SIZES))) == {}


def test_a_model_without_linear_layers_says_so():
    with pytest.raises(ValueError, match="GPT2LMHeadModel hold no nn.Linear"):
        feeding_norms(tiny_model("gpt2"))


@pytest.mark.parametrize("name", ["embedded", "embedded-moe"])
def test_the_shipped_policies_under_quantization(name):
    model = Policy(name).build()
    plain = list(feeding_norms(model))
    plan = PrecisionPlan()
    ForwardQuantization("nvfp4").declare(plan)
    plan.commit(model)
    assert list(feeding_norms(model)) == plain
    assert len(plain) == 2 * model.config.num_hidden_layers
