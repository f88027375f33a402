"""What the probes compare with, against plain float64: losses written out, numbers by hand."""

import pytest
import torch

from lightning_qrl.probes.oracle import Oracle, advantages
from lightning_qrl.probes.policies import HIDDEN, VOCABULARY, ProbePolicy
from lightning_qrl.probes.trial import Rollout, text

KINDS = ["qwen3", "gpt2", "table"]


def ids(characters):
    return tuple(VOCABULARY.index(character) for character in characters)


def a_rollout():
    prompts = [ids("x")] * 3 + [ids("yyx")] * 3
    said = [ids("a"), ids("ab"), ids("cb"), ids("b"), ids("ba"), ids("ba")]
    return Rollout(prompts, said, [], [1.0, 0.0, 0.5, 1.0, 0.0, 1.0], 3)


def at(kind, noise):
    """The oracle of a policy some way from where it began."""
    policy, draws = ProbePolicy(kind), torch.Generator().manual_seed(1)
    state = policy.build().state_dict()
    return Oracle(
        policy, {n: w + noise * torch.randn(w.shape, generator=draws) for n, w in state.items()}
    )


def test_advantages_by_hand():
    std = 0.5
    assert advantages(a_rollout())[:3] == pytest.approx([v / (std + 1e-4) for v in (0.5, -0.5, 0)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_gradient_is_that_of_the_clipped_loss(kind, noise):
    rollout, sampler, oracle = a_rollout(), at(kind, 0.0), at(kind, noise)
    got = oracle.gradient(rollout, sampler)
    model, loss = oracle.model, 0.0
    model.zero_grad()
    clipped = 0
    for prompt, said, advantage in zip(
        rollout.prompts, rollout.said, advantages(rollout), strict=True
    ):
        logits = model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
        new = torch.log_softmax(logits, -1)[range(len(said)), list(said)]
        ratio = (new - sampler.logprobs(prompt, said)).exp()
        clamped = ratio.clamp(0.8, 1.28)
        clipped += int((ratio != clamped).sum())
        loss = loss - torch.minimum(ratio * advantage, clamped * advantage).sum() / 10
    loss.backward()
    assert got
    assert bool(clipped) == bool(noise)
    for name, gradient in got.items():  # Qwen3 normalizes in FP32, whatever it is given
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


def test_a_table_is_a_row_of_logits_for_each_token():
    oracle = Oracle(ProbePolicy("table"), ProbePolicy("table").build().state_dict())
    head = oracle.model.lm_head.weight
    for prefix in ("x", "ax", "yyx", "ya"):
        row = HIDDEN**0.5 * head[:, VOCABULARY.index(prefix[-1])]
        torch.testing.assert_close(
            oracle.next_token(ids(prefix)), row.softmax(-1), rtol=1e-4, atol=0
        )
    assert [n for n, p in oracle.model.named_parameters() if p.requires_grad] == ["lm_head.weight"]


def test_the_temperature_divides_the_logits():
    policy = ProbePolicy("qwen3")
    weights = policy.build().state_dict()
    cool, plain = Oracle(policy, weights, 0.5), Oracle(policy, weights)
    squared = plain.next_token(ids("x")).square()
    torch.testing.assert_close(cool.next_token(ids("x")), squared / squared.sum())


def test_policies_follow_from_their_seed_and_leave_the_global_one_alone():
    torch.manual_seed(3)
    first = ProbePolicy("qwen3").build().state_dict()
    drawn = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(()))
    assert all(
        torch.equal(w, first[n]) for n, w in ProbePolicy("qwen3").build().state_dict().items()
    )


def test_text_is_what_the_policy_decodes():
    policy = ProbePolicy("gpt2")
    for said in (ids("ab"), (3, policy.eos_id), (policy.eos_id,), (policy.pad_id, 4)):
        assert text(said) == policy.decode(torch.tensor(said))
    assert tuple(policy.encode("yyx")) == ids("yyx")
