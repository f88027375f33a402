"""Scoring in batches against each completion alone in float64: values, entropy, every gradient."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny_models import EOS, MAKERS, PAD, VOCABULARY, tiny_model

from lightning_qrl import scoring
from lightning_qrl.errors import UserError
from lightning_qrl.experience import Completion, count_step, make_experience
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.scoring import Scorer

LONG, SHORT, OTHER = (5, 4, 3, 2, 6, 7), (3,), (2, 6, 6)
every_model = pytest.mark.parametrize("name", MAKERS)
each_way = pytest.mark.parametrize("shared_prefix", [True, False], ids=["shared", "rows"])


def batch(rows, hidden=()):
    """Completions from (prompt, tokens); (row, place) in ``hidden`` are taken out of the mask."""
    completions = [
        Completion(
            prompt_ids=tuple(prompt),
            token_ids_N=torch.tensor(tokens),
            logprobs_N=torch.zeros(len(tokens)),
            versions_N=torch.zeros(len(tokens), dtype=torch.int64),
            truncated=False,
        )
        for prompt, tokens in rows
    ]
    zeros = torch.zeros(len(rows))
    e = make_experience(completions, zeros, zeros, PAD)
    mask_BS = e.mask_BS.clone()
    for row, place in hidden:
        mask_BS[row, len(rows[row][0]) - 1 + place] = False
    return replace(e, mask_BS=mask_BS, step=count_step(mask_BS))


ROWS = [
    (LONG, [2, 7, 1]),
    (LONG, [9, 9, 4, 8, 3, 10, 1]),  # longer than the window
    (LONG, [2, 7, 1]),  # the same again
    (SHORT, [1]),  # one token after a prompt of one token
    (SHORT, [4, 1]),
    (OTHER, [6, 8, 0, 2]),  # the padding's own id, sampled
    (OTHER, [5, 5, 5]),  # masked altogether
    (OTHER, [3, 4, 5, 6, 1]),  # masked in the middle and at its end
    ((1, 2, 6, 6), [7, 1]),  # a prompt that ends as another one
]
HIDDEN = [(6, 0), (6, 1), (6, 2), (7, 1), (7, 4)]
MIXED = batch(ROWS, HIDDEN)


def exact(model, e, temperature):
    """Float64 log-probabilities and entropy of each row alone: no padding, no cache."""
    logprobs_BS = torch.zeros(e.mask_BS.shape, dtype=torch.float64)
    entropy_BS = torch.zeros_like(logprobs_BS)
    rows = []
    for b, mask_S in enumerate(e.mask_BS):
        if not mask_S.any():
            continue
        end = int(mask_S.nonzero().max()) + 2
        ids_1T = e.input_ids_BT[b : b + 1, :end]
        scores = model(input_ids=ids_1T, use_cache=False).logits[0, :-1] / temperature
        every = scores.log_softmax(-1)
        kept = mask_S[: end - 1]
        chosen = every.gather(-1, ids_1T[0, 1:, None])[:, 0]
        logprobs_BS[b, : end - 1][kept] = chosen[kept].detach()
        entropy_BS[b, : end - 1][kept] = -(every.exp() * every).sum(-1)[kept].detach()
        rows.append((b, chosen, kept))
    return logprobs_BS, entropy_BS, rows


def weights_of(e):
    return torch.randn(e.mask_BS.shape, generator=torch.Generator().manual_seed(3))


def gradients(model):
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def check(name, shared_prefix, e, temperature=1.3, **config):
    model = tiny_model(name, **config)
    oracle = copy.deepcopy(model).double()
    weights_BS = weights_of(e)

    logprobs_BS, entropy_BS, *_ = Scorer(model, shared_prefix=shared_prefix)(e, temperature)
    (logprobs_BS * weights_BS).sum().backward()

    want_BS, want_entropy_BS, rows = exact(oracle, e, temperature)
    sum((c * weights_BS[b, : len(c)])[kept].sum() for b, c, kept in rows).backward()

    assert logprobs_BS.dtype == entropy_BS.dtype == torch.float32
    assert not entropy_BS.requires_grad
    assert not logprobs_BS[~e.mask_BS].any()
    assert not entropy_BS[~e.mask_BS].any()
    torch.testing.assert_close(logprobs_BS.double(), want_BS, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy_BS.double(), want_entropy_BS, rtol=0, atol=2e-5)
    got, want = gradients(model), gradients(oracle)
    assert got.keys() == want.keys()
    for parameter, gradient in want.items():
        error = (got[parameter] - gradient).norm() / gradient.norm().clamp_min(1e-3)
        assert error < 2e-4, f"{parameter}: {error:.1e}"


@every_model
@each_way
def test_values_entropy_and_gradients_are_those_of_each_completion_alone(name, shared_prefix):
    check(name, shared_prefix, MIXED)


ONE_TOKEN = batch([(LONG, [1]), (SHORT, [4]), (SHORT, [4]), (OTHER, [1])])
NO_PADDING = batch([(OTHER, [4, 5, 1]), (OTHER, [7, 7, 7]), ((9, 8, 7), [2, 2, 1])])
NONE = MIXED.where(torch.zeros(len(MIXED), dtype=torch.bool))
PART = MIXED.take(torch.tensor([3, 6, 4]))  # the masked row's prompt is cut off with the padding
LAST_HIDDEN = batch([(SHORT, [4, 5, 1]), (SHORT, [4, 5, 6])], hidden=[(0, 2), (1, 2)])
BATCHES = {
    "one token": ONE_TOKEN,
    "no padding": NO_PADDING,
    "rows cut": PART,
    "end not counted": LAST_HIDDEN,
}


@each_way
@pytest.mark.parametrize("e", BATCHES.values(), ids=BATCHES.keys())
def test_batches_of_every_shape(e, shared_prefix):
    check("qwen3", shared_prefix, e)
    check("gpt2", shared_prefix, e, temperature=0.6)


@each_way
def test_a_batch_without_a_token_gives_zeros_and_no_gradient(shared_prefix):
    model = tiny_model("qwen3")
    for e in (NONE, MIXED.take(torch.tensor([6]))):
        logprobs_BS, entropy_BS, *_ = Scorer(model, shared_prefix=shared_prefix)(e, 1.0)
        assert logprobs_BS.shape == entropy_BS.shape == e.mask_BS.shape
        assert not logprobs_BS.any()
        assert not entropy_BS.any()
        logprobs_BS.sum().backward()
        assert not any(g.any() for g in gradients(model).values())


def test_lengths_computed_apart_change_nothing_but_rounding(monkeypatch):
    whole = Scorer(tiny_model("llama"), shared_prefix=True)(MIXED, 1.0)[0]
    passes = []
    monkeypatch.setattr(scoring, "BUCKET_ROWS", 2)
    model = tiny_model("llama")
    model.base_model.register_forward_pre_hook(
        lambda _, __, given: passes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    scorer = Scorer(model, shared_prefix=True)
    passes.clear()
    parts = scorer(MIXED, 1.0)[0]
    # 4 prompts; distinct completions read 1, 1, 2, 3, 3 and 6 tokens after them (0 not at all)
    assert passes == [(4, 6), (2, 1), (2, 3), (2, 6)]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    check("llama", True, MIXED)


# ---- what cannot be computed so is refused, and the trial leaves no trace ------------------------


def test_a_cache_that_holds_more_than_keys_and_values_is_refused():
    model = tiny_model("lfm2")
    with pytest.raises(UserError, match="Lfm2ForCausalLM: .* set grpo.shared_prefix=false") as said:
        Scorer(model, shared_prefix=True)
    assert "\n" not in str(said.value)
    assert model.training
    check("lfm2", False, MIXED)


def test_a_cache_that_gives_other_numbers_is_refused():
    model = tiny_model("llama")
    model.base_model.layers[1].register_forward_hook(
        lambda _, given, out: out + (0.01 if out.shape[1] == 1 else 0.0)
    )
    with pytest.raises(UserError, match="LlamaForCausalLM: its key-value cache changes"):
        Scorer(model, shared_prefix=True)
    assert model.training
    Scorer(model, shared_prefix=False)


def test_logits_that_are_more_than_the_heads_output_are_the_models_own():
    model = tiny_model("gemma2", final_logit_softcapping=0.1)  # nearly uniform, and so it must be
    logprobs_BS, entropy_BS, *_ = Scorer(model, shared_prefix=True)(MIXED, 1.0)
    even = torch.tensor(float(VOCABULARY)).log()
    assert (logprobs_BS[MIXED.mask_BS] + even).abs().max() < 0.2
    assert (entropy_BS[MIXED.mask_BS] - even).abs().max() < 0.01


def test_the_trial_rounds_as_the_model_does_whatever_the_trainer_does():
    model, seen = tiny_model("qwen3"), []
    model.lm_head.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Scorer(model, shared_prefix=True)
    assert set(seen) == {torch.float32}
    assert model.training
    assert all(p.grad is None for p in model.parameters())


# ---- the sampler's numbers -----------------------------------------------------------------------

PROMPTS = [LONG, SHORT, OTHER, (4, 5, 2, 3)]
TEMPERATURES = [0.6, 1.0, 1.3]
TRUNCATIONS = [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 5}]


def rollout(model, temperature, **truncation):
    """What the embedded engine samples from ragged, hence left-padded, prompts; and its engine."""
    engine = Embedded(
        eos_id=EOS, pad_id=PAD, temperature=temperature, max_new_tokens=7, **truncation
    )
    engine.sync(model, 0)
    completions = engine.generate(PROMPTS, samples=8, seed=0)
    zeros = torch.zeros(len(completions))
    return make_experience(completions, zeros, zeros, PAD)


def largest_ratio(logprobs_BS, e):
    """The largest |ratio - 1| of a sampled token."""
    return float(((logprobs_BS - e.logprobs_BS).exp() - 1)[e.mask_BS].abs().max())


@every_model
@torch.no_grad()
def test_with_the_samplers_weights_every_importance_ratio_is_one(name):
    """FP32: what is left is the key-value cache and the order of sums, at most 2e-5."""
    model = tiny_model(name)
    scorers = [Scorer(model, shared_prefix=shared) for shared in (True, False)]
    for temperature in TEMPERATURES:
        e = rollout(model, temperature)
        assert len(set(e.mask_BS.sum(dim=1).tolist())) > 1  # ragged
        for scorer in scorers:
            assert largest_ratio(scorer(e, temperature)[0], e) < 2e-5
        assert largest_ratio(scorers[0](e, 1.1 * temperature)[0], e) > 1e-2  # it would be seen


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@torch.no_grad()
def test_a_truncated_sampler_is_mirrored(truncation):
    model = tiny_model("qwen3")
    oracle = copy.deepcopy(model).double()
    scorers = [Scorer(model, shared_prefix=shared) for shared in (True, False)]
    for temperature in TEMPERATURES:
        e = rollout(model, temperature, **truncation)
        want_BS = truncated_entropy(oracle, e, temperature)
        for scorer in scorers:
            logprobs_BS, entropy_BS, *_ = scorer(e, temperature)
            assert largest_ratio(logprobs_BS, e) < 2e-5
            torch.testing.assert_close(entropy_BS.double(), want_BS, rtol=0, atol=2e-5)
        whole_BS, *_ = scorers[0](replace(e, kept_BSK=None), temperature)
        assert largest_ratio(whole_BS, e) > 1e-2  # without mirroring it is not 1


def truncated_entropy(model, e, temperature):
    """Entropy of the renormalised distribution over the tokens that were kept, float64."""
    logits_BSV = model(input_ids=e.input_ids_BT[:, :-1], use_cache=False).logits / temperature
    kept_BSV = torch.zeros(*logits_BSV.shape[:2], VOCABULARY + 1, dtype=torch.bool)
    ids_BSK = e.kept_BSK.masked_fill(e.kept_BSK < 0, VOCABULARY)
    kept_BSV = kept_BSV.scatter(-1, ids_BSK, True)[..., :VOCABULARY]
    p_BSV = logits_BSV.masked_fill(~kept_BSV, -torch.inf).softmax(-1)
    return torch.special.entr(p_BSV).sum(-1).masked_fill(~e.mask_BS, 0.0)


@each_way
def test_after_an_update_the_ratio_is_against_the_policy_that_sampled(shared_prefix):
    model = tiny_model("qwen3")
    scorer = Scorer(model, shared_prefix=shared_prefix)
    e = rollout(model, 1.3)
    sampled_with = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for update in range(3):
        logprobs_BS, _, *_ = scorer(e, 1.3)
        want_BS = exact(copy.deepcopy(model).double(), e, 1.3)[0]
        old_BS = exact(sampled_with, e, 1.3)[0]
        ratio_BS = (logprobs_BS - e.logprobs_BS).exp()[e.mask_BS].double()
        want_ratio_BS = (want_BS - old_BS).exp()[e.mask_BS]
        torch.testing.assert_close(ratio_BS, want_ratio_BS, rtol=5e-5, atol=0)
        assert (float((want_ratio_BS - 1).abs().max()) > 1e-2) == (update > 0)
        optimizer.zero_grad()
        (logprobs_BS * weights_of(e)).mean().backward()
        optimizer.step()
