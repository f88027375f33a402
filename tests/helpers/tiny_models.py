"""Causal language models of many architectures, two layers each, with random weights.

The initial scale is large, so that log-probabilities differ by nats and a wrong position, a wrong
mask or a wrong head shows.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY, PAD, EOS = 11, 0, 1
WINDOW = 4

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}


def qwen3(**config: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **config}))


def gpt2(**config: Any) -> PreTrainedModel:
    """Absolute positions, a tied head."""
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ids = {"bos_token_id": EOS, "eos_token_id": EOS, "vocab_size": VOCABULARY}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made = {**sizes, **ids, **no_dropout, "initializer_range": 0.2, **config}
    return GPT2LMHeadModel(GPT2Config(**made))


def llama(**config: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **config}))


def mistral(**config: Any) -> PreTrainedModel:
    """A window of attention shorter than the sequences."""
    return MistralForCausalLM(MistralConfig(**{**SIZES, "sliding_window": WINDOW, **config}))


def gemma2(**config: Any) -> PreTrainedModel:
    """Logits and attention scores are capped; every other layer has a window."""
    own = {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
        "sliding_window": WINDOW,
        "attn_implementation": "eager",
    }
    return Gemma2ForCausalLM(Gemma2Config(**{**SIZES, **own, **config}))


def qwen2_moe(**config: Any) -> PreTrainedModel:
    """Experts, one of them shared."""
    own = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }
    return _eager(Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**SIZES, **own, **config})))


def olmoe(**config: Any) -> PreTrainedModel:
    """Experts alone."""
    own = {"num_experts": 4, "num_experts_per_tok": 2}
    return _eager(OlmoeForCausalLM(OlmoeConfig(**{**SIZES, **own, **config})))


def lfm2(**config: Any) -> PreTrainedModel:
    """A short convolution: its cache is more than keys and values."""
    return Lfm2ForCausalLM(
        Lfm2Config(**{**SIZES, "layer_types": ["conv", "full_attention"], **config})
    )


def _eager(model: PreTrainedModel) -> PreTrainedModel:
    model.set_experts_implementation("eager")  # the one that runs in float64
    return model


MAKERS: dict[str, Callable[..., PreTrainedModel]] = {
    made.__name__: made for made in (qwen3, gpt2, llama, mistral, gemma2, qwen2_moe, olmoe)
}


def tiny_model(name: str, **config: Any) -> PreTrainedModel:
    """One of them, in training mode, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (MAKERS | {"lfm2": lfm2})[name](**config).train()
