"""Truncated sampling: the renormalised distribution, and the ids that a trainer mirrors it with."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_qrl.logprobs import head_logprobs
from lightning_qrl.rollouts.embedded import Embedded

EOS, PAD, VOCABULARY = 1, 0, 40
PROMPTS = [[5, 4, 3, 2, 6, 5, 4], [3], [2, 6, 6]]
CUTS = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.05},
]
every_cut = pytest.mark.parametrize("cut", CUTS, ids=str)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


def generate(model, samples=6, **options):
    engine = Embedded(eos_id=EOS, pad_id=PAD, **options)
    engine.sync(model, 0)
    return engine.generate(PROMPTS, samples=samples, seed=0)


def truncated(p, top_p=1.0, top_k=0, min_p=0.0):
    """A distribution after each cut in turn, every one of them in its plainest form."""
    ranked = sorted(range(len(p)), key=lambda v: -p[v])
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1:
        total, before, kept = sum(p[v] for v in ranked), 0.0, []
        for v in ranked:
            if before < top_p * total:
                kept.append(v)
            before += p[v]
        ranked = kept
    ranked = [v for v in ranked if p[v] >= min_p * p[ranked[0]]]
    total = sum(p[v] for v in ranked)
    return {v: p[v] / total for v in ranked}


@every_cut
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@torch.no_grad()
def test_the_kept_ids_and_log_probabilities_are_those_of_the_definition(model, cut, temperature):
    sizes = set()
    for c in generate(model, temperature=temperature, **cut):
        tokens = c.token_ids_N.tolist()
        logits = model(input_ids=torch.tensor([[*c.prompt_ids, *tokens]])).logits[0]
        p_NV = (logits[len(c.prompt_ids) - 1 : -1].double() / temperature).softmax(-1)
        for p, token, logprob, kept in zip(
            p_NV.tolist(), tokens, c.logprobs_N, c.kept_NK.tolist(), strict=True
        ):
            want = truncated(p, **cut)
            ids = [v for v in kept if v >= 0]
            assert ids == sorted(want)
            assert kept == ids + [-1] * (len(kept) - len(ids))
            assert float(logprob.exp()) == pytest.approx(want[token], abs=1e-5)
            sizes.add(len(ids))
        assert (c.kept_NK[:, -1] >= 0).any()  # as wide as its largest set
    assert cut == {"top_k": 5} or len(sizes) > 2


@every_cut
@torch.no_grad()
def test_a_trainer_that_mirrors_the_kept_ids_begins_with_ratio_1(model, cut):
    for c in generate(model, temperature=1.3, **cut):
        ids = torch.cat([torch.tensor(c.prompt_ids), c.token_ids_N])
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0, len(c.prompt_ids) - 1 : -1]
        whole, mirrored = (
            head_logprobs(hidden, model.lm_head, VOCABULARY, c.token_ids_N, 1.3, kept)[0]
            for kept in (None, c.kept_NK)
        )
        torch.testing.assert_close(mirrored, c.logprobs_N, rtol=0, atol=1e-5)
        assert (whole < c.logprobs_N).all()


@torch.no_grad()
def test_one_token_is_greedy_and_certain(model):
    for c in generate(model, top_k=1):
        assert torch.equal(c.logprobs_N, torch.zeros_like(c.logprobs_N))
        assert torch.equal(c.kept_NK, c.token_ids_N[:, None])
        logits = model(input_ids=torch.tensor([[*c.prompt_ids, *c.token_ids_N]])).logits[0]
        assert torch.equal(logits[len(c.prompt_ids) - 1 : -1].argmax(-1), c.token_ids_N)


def test_nothing_is_cut_off_by_default(model):
    assert all(c.kept_NK is None for c in generate(model))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p must be above 0"),
        ({"top_p": float("nan")}, "top_p must be above 0"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"min_p": -0.1}, "min_p must be at least 0 and below 1"),
        ({"min_p": 1.0}, "min_p must be at least 0 and below 1"),
    ],
)
def test_arguments_out_of_range(wrong, says):
    with pytest.raises(ValueError, match=says):
        Embedded(eos_id=EOS, pad_id=PAD, **wrong)
