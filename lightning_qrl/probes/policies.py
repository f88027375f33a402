"""Policies small enough to train in milliseconds, made in code; their weights follow from a seed.

Nine tokens, one character each. Three kinds:

    qwen3    one layer of Qwen3: rotary positions, grouped queries, untied head
    gpt2     one layer of GPT-2: learned absolute positions, so that a wrong one is seen at once
    table    a Qwen3 whose layer adds nothing and whose head alone is trained, on orthogonal
             embeddings: a table of one row of logits for each previous token. No row's update
             touches another row, so a probability that earns nothing has no reason to move.
"""

from functools import cached_property
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typing_extensions import override

from lightning_qrl.policy import Policy

Kind = Literal["qwen3", "gpt2", "table"]
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNK, *"abcxyz")
HIDDEN = 32
SEED = 0


class ProbePolicy(Policy):
    """A policy made in code.

    Args:
        kind: see the module's text.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__(f"probe:{kind}", init="random")
        self.kind = kind

    @cached_property
    @override
    def tokenizer(self) -> PreTrainedTokenizerBase:
        ids = {token: i for i, token in enumerate(VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK
        )

    @override
    def build(self) -> PreTrainedModel:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model: PreTrainedModel = _gpt2() if self.kind == "gpt2" else _qwen3()
        if self.kind == "table":
            _make_table(model)
        model.train()
        return model


def _qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY), hidden_size=HIDDEN, intermediate_size=2 * HIDDEN,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            initializer_range=0.02, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(VOCABULARY), n_embd=HIDDEN, n_layer=1, n_head=2, n_positions=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1,
            eos_token_id=1, bos_token_id=1,
        )
    )  # fmt: skip


def _make_table(model: PreTrainedModel) -> None:
    """One-hot embeddings pass the layer unchanged; the norm makes them sqrt(HIDDEN) long."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(name == "lm_head.weight")
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif name.endswith("embed_tokens.weight"):
            nn.init.eye_(weight)
