"""The embedded engine: the sampler's numbers are the trainer's, and its draws follow them."""

import copy
import itertools
import math

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightning_qrl.experience import make_experience
from lightning_qrl.logprobs import token_logprobs
from lightning_qrl.rollouts.embedded import Embedded

PAD, EOS = 0, 1
RAGGED = [[5, 4, 3, 2, 6, 5, 4], [3], [2, 6, 6], [4, 5, 2, 3]]
TEMPERATURES = [0.6, 1.0, 1.3]


def qwen3(vocab=9, scale=0.4):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=scale,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config)


def even_qwen3():
    """Seven tokens, each about as likely."""
    return qwen3(vocab=7, scale=0.05)


def gpt2(vocab=9):
    """Absolute positions, and dropout."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.4,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    return GPT2LMHeadModel(config)


SIZES = {
    "vocab_size": 9,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def sliding():
    """A window shorter than the prompts."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3))


def experts():
    torch.manual_seed(0)
    own = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "initializer_range": 0.3,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | own))
    model.set_experts_implementation("eager")  # the one that runs in float64
    return model


def convolution():
    """A cache that is more than keys and values."""
    torch.manual_seed(0)
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]))


MODELS = {
    "qwen3": qwen3,
    "gpt2": gpt2,
    "sliding": sliding,
    "experts": experts,
    "convolution": convolution,
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def generate(model, prompts=RAGGED, samples=4, seed=0, version=0, **options):
    engine = Embedded(**{"eos_id": EOS, "pad_id": PAD, "max_new_tokens": 6, **options})
    engine.sync(model, version)
    return engine.generate(prompts, samples=samples, seed=seed)


def alone(model, prompt, tokens, temperature):
    """Log-probabilities of a completion in float64: one sequence, no padding, no cache."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@every_model
@pytest.mark.parametrize("temperature", TEMPERATURES)
@torch.no_grad()
def test_log_probabilities_are_those_of_each_sequence_alone(make, temperature):
    model = make().eval()
    exact = copy.deepcopy(model).double()
    completions = generate(model, samples=8, temperature=temperature)
    assert len({len(c.token_ids_N) for c in completions}) > 2
    for c in completions:
        want = alone(exact, c.prompt_ids, c.token_ids_N.tolist(), temperature)
        torch.testing.assert_close(c.logprobs_N.double(), want, rtol=0, atol=1e-5)


@every_model
@pytest.mark.parametrize("temperature", TEMPERATURES)
@torch.no_grad()
def test_the_trainer_sees_the_samplers_log_probabilities(make, temperature):
    model = make().eval()
    completions = generate(model, temperature=temperature)
    zeros = torch.zeros(len(completions))
    e = make_experience(completions, zeros, zeros, PAD)
    logits = model(input_ids=e.input_ids_BT[:, :-1], use_cache=False).logits
    logprobs, _ = token_logprobs(logits, e.input_ids_BT[:, 1:], temperature)
    difference = (logprobs - e.logprobs_BS)[e.mask_BS].abs().max()
    print(f"\n{type(model).__name__}, temperature {temperature}: max |dlogp| = {difference:.1e}")
    assert difference < 1e-5


@every_model
def test_a_prompt_alone_draws_what_it_draws_in_a_longer_batch(make):
    # the first prompt is as wide as the batch, so the generator is consumed alike
    together = generate(make(), [RAGGED[0], RAGGED[1]], samples=1, max_new_tokens=1)
    by_itself = generate(make(), [RAGGED[0]], samples=1, max_new_tokens=1)
    assert torch.equal(together[0].token_ids_N, by_itself[0].token_ids_N)
    torch.testing.assert_close(together[0].logprobs_N, by_itself[0].logprobs_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 1.3])
@torch.no_grad()
def test_frequencies_are_the_probabilities_of_every_possible_completion(temperature):
    model = qwen3(vocab=4).eval()
    prompt, draws = [2, 3, 2], 20_000
    every = [(EOS,)] + [p for p in itertools.product(range(4), repeat=2) if p[0] != EOS]
    expected = {
        tokens: draws * math.exp(float(alone(model, prompt, list(tokens), temperature).sum()))
        for tokens in every
    }
    assert sum(expected.values()) == pytest.approx(draws, rel=1e-4)
    completions = generate(
        model, [prompt], samples=draws, max_new_tokens=2, temperature=temperature
    )
    seen = [tuple(c.token_ids_N.tolist()) for c in completions]
    chi2 = sum((seen.count(tokens) - n) ** 2 / n for tokens, n in expected.items())
    freedom = len(every) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_a_completion_ends_with_its_first_end_token_or_is_truncated():
    completions = generate(even_qwen3(), samples=50, max_new_tokens=4)
    assert {c.truncated for c in completions} == {True, False}
    for c in completions:
        ids = c.token_ids_N.tolist()
        assert EOS not in ids[:-1]
        assert c.truncated == (ids[-1] != EOS)
        assert len(ids) == 4 or not c.truncated
        assert len(ids) == len(c.logprobs_N) == len(c.versions_N)


def test_an_end_token_in_the_last_place_is_no_truncation():
    completions = generate(even_qwen3(), samples=50, max_new_tokens=4)
    full_length = {c.truncated for c in completions if len(c.token_ids_N) == 4}
    assert full_length == {True, False}


def test_the_end_token_is_trained_on_even_where_it_is_also_the_padding():
    completions = generate(even_qwen3(), pad_id=EOS)
    zeros = torch.zeros(len(completions))
    e = make_experience(completions, zeros, zeros, pad_id=EOS)
    trained = e.input_ids_BT[:, 1:][e.mask_BS]
    ended = sum(not c.truncated for c in completions)
    assert ended > 0
    assert int((trained == EOS).sum()) == ended
    assert e.step.tokens == sum(len(c.token_ids_N) for c in completions)


@every_model
def test_the_padding_token_does_not_matter(make):
    for a, b in zip(generate(make()), generate(make(), pad_id=EOS), strict=True):
        assert torch.equal(a.token_ids_N, b.token_ids_N)
        torch.testing.assert_close(a.logprobs_N, b.logprobs_N, rtol=0, atol=1e-6)


@every_model
def test_what_a_completion_draws_depends_on_no_other_one_having_ended(make):
    whole = generate(make(), samples=20, eos_id=-1)
    assert all(c.truncated for c in whole)
    ended = 0
    for a, b in zip(whole, generate(make(), samples=20), strict=True):
        n = len(b.token_ids_N)
        assert torch.equal(a.token_ids_N[:n], b.token_ids_N)
        torch.testing.assert_close(a.logprobs_N[:n], b.logprobs_N, rtol=0, atol=1e-5)
        ended += n < len(a.token_ids_N)
    assert 0 < ended < len(whole)


@every_model
def test_each_distinct_sequence_is_computed_once(make):
    model = make()
    rows = []
    model.register_forward_pre_hook(
        lambda _, __, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    completions = generate(model, samples=40)
    begun = [
        {(c.prompt_ids, *c.token_ids_N[:t].tolist()) for c in completions if len(c.token_ids_N) > t}
        for t in range(6)
    ]
    assert rows == [len(sequences) for sequences in begun if sequences]
    assert rows[0] == len(RAGGED) < rows[1] < 40 * len(RAGGED)


def test_sampling_stops_when_all_are_done():
    model = even_qwen3()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    completions = generate(model, max_new_tokens=500)
    longest = max(len(c.token_ids_N) for c in completions)
    assert not any(c.truncated for c in completions)
    assert len(calls) == longest < 100


def test_sampling_never_exceeds_the_limit():
    model = qwen3()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert all(len(c.token_ids_N) == 1 for c in generate(model, max_new_tokens=1))
    assert len(calls) == 1


def test_order_prompts_and_versions():
    completions = generate(qwen3(), samples=3, version=7)
    assert [list(c.prompt_ids) for c in completions] == [p for p in RAGGED for _ in range(3)]
    assert {v for c in completions for v in c.versions_N.tolist()} == {7}


@every_model
def test_the_seed_decides_the_completions(make):
    model = make()
    first, again, other = (generate(model, seed=seed) for seed in (3, 3, 4))
    torch.rand(5)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.token_ids_N, b.token_ids_N)
        assert torch.equal(a.logprobs_N, b.logprobs_N)
    draws = [[c.token_ids_N.tolist() for c in run] for run in (first, other)]
    assert draws[0] != draws[1]


def test_the_global_random_state_is_left_alone():
    model = qwen3()
    state = torch.get_rng_state()
    generate(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fails", [False, True])
def test_eval_mode_without_grad_and_every_flag_restored(fails):
    model = gpt2().train()
    model.transformer.h[1].eval()
    model.transformer.ln_f.training = False
    before = [m.training for m in model.modules()]
    seen = []

    def look(module, *_):
        seen.append((any(m.training for m in model.modules()), torch.is_grad_enabled()))
        if fails and len(seen) == 2:
            raise RuntimeError("the chip is gone")

    model.register_forward_hook(look)
    if fails:
        with pytest.raises(RuntimeError, match="the chip is gone"):
            generate(model)
    else:
        assert not any(c.logprobs_N.requires_grad for c in generate(model))
    assert set(seen) == {(False, False)}
    assert [m.training for m in model.modules()] == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_arguments_out_of_range(wrong, says):
    with pytest.raises(ValueError, match=says):
        Embedded(eos_id=EOS, pad_id=PAD, **wrong)
