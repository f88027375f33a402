"""Small models of the architectures whose names selectors are written for."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def llama():
    """Makes a Llama; on the meta device unless told otherwise."""

    def make(layers=8, tied=False, device="meta"):
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, num_hidden_layers=layers, tie_word_embeddings=tied)
        with torch.device(device):
            return LlamaForCausalLM(config)

    return make


@pytest.fixture
def qwen2_moe():
    config = Qwen2MoeConfig(
        **SIZES,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with torch.device("meta"):
        return Qwen2MoeForCausalLM(config)


@pytest.fixture
def gpt2():
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
