"""Log-probabilities and importance ratios: faults that users met elsewhere, each right here.

The numbers are those of the list that the tests follow; each docstring links to the report.
"""

import copy
from dataclasses import replace

import pytest
import torch
from grpo_parts import (
    NEW,
    Watched,
    completion,
    data_of,
    experience_of,
    largest_ratio,
    module_of,
)
from tiny_models import EOS, PAD, tiny_model

from lightning_qrl.build import build
from lightning_qrl.policy import Policy
from lightning_qrl.recipe import load_recipe
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.scoring import Scorer


def rollout(model, prompts, samples=8, **options):
    engine = Embedded(**{"eos_id": EOS, "pad_id": PAD, "max_new_tokens": NEW, **options})
    engine.sync(model, 0)
    return experience_of(engine.generate(prompts, samples=samples, seed=0))


def test_row_07_the_end_token_is_trained_on_where_padding_is_the_same_token():
    """https://github.com/huggingface/trl/pull/4970 ; masks come from lengths, not from values."""
    e = experience_of([completion([4, EOS]), completion([EOS]), completion([4, 5, 6])], pad_id=EOS)
    assert e.mask_BS.tolist() == [
        [False, True, True, False],
        [False, True, False, False],
        [False, True, True, True],
    ]
    model = tiny_model("gpt2")
    logprobs_BS, _, *_ = Scorer(model, shared_prefix=True)(e, 1.0)
    assert (logprobs_BS != 0).tolist() == e.mask_BS.tolist()
    weight = model.get_input_embeddings().weight
    logprobs_BS[1, 1].backward()  # the end token after a prompt, nothing else
    assert weight.grad.any()


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@torch.no_grad()
def test_row_09_a_padded_batch_scores_as_each_sequence_alone(name):
    """https://github.com/unslothai/unsloth-zoo/pull/840 ; also far from the beginning."""
    g = torch.Generator().manual_seed(0)
    rows = [completion(torch.randint(11, (n,), generator=g).tolist(), prompt)
            for n in (40, 1, 13) for prompt in ((3,), tuple(range(2, 10)))]  # fmt: skip
    e = experience_of(rows)
    model = tiny_model(name)
    oracle = copy.deepcopy(model).double()
    logprobs_BS, _, *_ = Scorer(model, shared_prefix=True)(e, 1.0)
    for b, row in enumerate(rows):
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids_N.tolist()]])
        every = oracle(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        want = every.gather(-1, row.token_ids_N[:, None])[:, 0]
        got = logprobs_BS[b][e.mask_BS[b]].double()
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@torch.no_grad()
def test_row_10_at_any_temperature_the_ratio_is_one(temperature):
    """https://github.com/huggingface/trl/issues/4159 ; both sides divide the logits."""
    model = tiny_model("qwen3")
    e = rollout(model, [(5, 4, 3, 2), (3,)], temperature=temperature)
    assert largest_ratio(Scorer(model, shared_prefix=True)(e, temperature)[0], e) < 2e-5


@torch.no_grad()
def test_row_11_truncation_is_off_unless_asked_for_and_then_mirrored():
    """https://github.com/huggingface/trl/issues/6789 ; renormalised on both sides, or biased."""
    assert not build(load_recipe("base")).module.engine.truncation
    model = tiny_model("qwen3")
    scorer = Scorer(model, shared_prefix=True)
    for truncation in ({"top_p": 0.7}, {"top_k": 2}, {"min_p": 0.3}):
        e = rollout(model, [(5, 4, 3, 2), (3,)], **truncation)
        assert largest_ratio(scorer(e, 1.0)[0], e) < 2e-5
        assert largest_ratio(scorer(replace(e, kept_BSK=None), 1.0)[0], e) > 0.05


def test_row_17_sampling_is_without_dropout_whatever_the_mode_and_dropout_is_warned_of(
    save_policy, parity, fit, tmp_path
):
    """https://github.com/huggingface/trl/issues/3000 ; one mode for sampling, and a word on it."""
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    dropping, still = (
        rollout(mode, [(5, 4), (3,)]) for mode in (model.train(), copy.deepcopy(model).eval())
    )
    assert torch.equal(dropping.logprobs_BS, still.logprobs_BS)
    assert model.training
    save_policy(tmp_path, attention_dropout=0.1)
    with pytest.warns(UserWarning, match="trains with dropout but samples without"):
        fit(module_of(Policy(str(tmp_path)), parity), data_of(parity), 1)


def test_row_21_the_sampled_ids_are_trained_on(tiny_policy, parity, fit):
    """https://github.com/stanford-cs336/assignment5-alignment/issues/15 ; never encoded again."""
    policy, texts = Policy(tiny_policy.name), []
    encode = policy.encode
    policy.encode = lambda text, **how: texts.append(text) or encode(text, **how)
    module, sampled = module_of(policy, parity), []
    generate = module.engine.generate
    module.engine.generate = lambda *a, **k: sampled.extend(generate(*a, **k)) or sampled
    fit(module, data_of(parity), 1)
    ((batch, _),) = module.seen
    assert len(sampled) == len(batch)
    for row, one in enumerate(sampled):
        ids = batch.input_ids_BT[row]
        assert torch.equal(ids[1:][batch.mask_BS[row]], one.token_ids_N)
        assert tuple(ids[: len(one.prompt_ids)].tolist()) == one.prompt_ids
    assert set(texts) <= {p.text for p in parity.prompts("train")}  # prompts alone


class Copying(Watched):
    copies = True


def token_logprobs(model, e, b):
    """Float64 log-probabilities of one completion's tokens, by itself."""
    with torch.no_grad():
        every = model(input_ids=e.input_ids_BT[b : b + 1, :-1]).logits[0].log_softmax(-1)
    return every.gather(-1, e.input_ids_BT[b, 1:, None])[:, 0][e.mask_BS[b]]


def test_row_22_later_updates_compare_with_the_policy_that_sampled(
    tiny_policy, parity, fit, recorder
):
    """https://github.com/huggingface/trl/pull/5757 ; stored log-probabilities, never recomputed."""
    module = module_of(tiny_policy, parity, Copying)
    fit(module, data_of(parity, num_iterations=3), 3, logger=recorder)
    sampled_with = tiny_policy.build().double()
    for number, ((e, now), logged) in enumerate(zip(module.seen, recorder.steps, strict=True)):
        log_ratio = torch.cat(
            [token_logprobs(now, e, b) - token_logprobs(sampled_with, e, b) for b in range(len(e))]
        )
        ratio = log_ratio.exp()
        for end in ("min", "mean", "max"):
            want = float(getattr(ratio, end)())
            assert logged[f"train/importance_ratio/{end}"] == pytest.approx(want, rel=1e-4)
        assert (float((ratio - 1).abs().max()) > 1e-2) == (number > 0)
