"""Score centering: exact enumerations in float64, an independent evaluation, and what is refused.

B completions, S predictions, V vocabulary, K head.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from lightning_qrl.corrections.base import Weight
from lightning_qrl.corrections.centering import Centering
from lightning_qrl.corrections.stack import Corrections
from lightning_qrl.corrections.weights import Masked, Rejection, Truncated
from lightning_qrl.errors import UserError
from lightning_qrl.experience import Completion, make_experience
from lightning_qrl.logprobs import Scores
from lightning_qrl.losses.base import Loss
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.losses.distill import Distill
from lightning_qrl.losses.gspo import Gspo
from lightning_qrl.losses.reinforce import Reinforce
from lightning_qrl.objective import Objective
from lightning_qrl.plugins import load_plugin, plugin_names
from lightning_qrl.rollouts.embedded import Embedded

V = 6  # of the policies that are enumerated
PLAIN = Reinforce()


@dataclass(frozen=True)
class Exact(Weight):
    """The ratio itself."""

    def __call__(self, ratio):
        return ratio


WEIGHTS = {
    "none": [],
    "truncated": [Truncated(cap=1.1)],
    "masked": [Masked(low=0.7, high=1.2)],
    "rejection": [Rejection(low=0.7, high=1.2)],
    "truncated and rejection": [Truncated(cap=1.1), Rejection(low=0.7, high=1.3)],
    "exact": [Exact()],
}


def corrections_of(head, weights):
    corrections = Corrections()
    for number, weight in enumerate(weights):
        corrections.add(weight, by=f"weight_{number}")
    if head:
        corrections.add(Centering(head), by="score_centering")
    return corrections


def gradient_of(logits_BSV, sampler_BSV, experience, head, weights=(), loss=PLAIN):
    """The objective's gradient with respect to the trainer's logits, and its metrics."""
    logits_BSV = logits_BSV.detach().requires_grad_()
    logp_BSV, logq_BSV = logits_BSV.log_softmax(-1), sampler_BSV.log_softmax(-1)
    targets_BS1 = experience.input_ids_BT[:, 1:, None]
    told = logq_BSV.topk(min(head or 1, logq_BSV.shape[-1]), dim=-1)
    experience = replace(
        experience,
        logprobs_BS=logq_BSV.gather(-1, targets_BS1)[..., 0],
        head_ids_BSK=told.indices,
        head_logprobs_BSK=told.values,
    )
    logprobs_BS = logp_BSV.gather(-1, targets_BS1)[..., 0]
    nothing_BS = torch.zeros_like(logprobs_BS)
    scores = Scores(logprobs_BS, nothing_BS, nothing_BS, logp_BSV.gather(-1, told.indices))
    objective = Objective(loss, corrections=corrections_of(head, weights))
    value, metrics = objective(scores, experience)
    return torch.autograd.grad(value, logits_BSV)[0], metrics


# --- a policy small enough to enumerate: two tokens of V, the second depends on the first --------


def tables(seed=0, apart=0.6):
    """Logits of trainer and sampler, float64: of the first token [V], of the second [V, V]."""
    g = torch.Generator().manual_seed(seed)
    trainer = [torch.randn(*s, dtype=torch.float64, generator=g) for s in ((V,), (V, V))]
    drift = [torch.randn(*s, dtype=torch.float64, generator=g) for s in ((V,), (V, V))]
    return trainer, [t + apart * d for t, d in zip(trainer, drift, strict=True)]


def all_completions():
    pairs = [(a, b) for a in range(V) for b in range(V)]
    zeros = torch.zeros(2)
    each = [Completion((0,), torch.tensor(p), zeros, zeros.long(), False) for p in pairs]
    return pairs, make_experience(each, torch.zeros(len(pairs)), torch.zeros(len(pairs)), 0)


def expected_gradient(rewards_B, head, weights=(), loss=PLAIN):
    """E_q[reward x gradient] over all completions, of the two tables flattened."""
    (first_V, second_VV), (sampler_V, sampler_VV) = tables()
    pairs, experience = all_completions()
    a_B, b_B = torch.tensor(pairs).T
    q_B = sampler_V.log_softmax(-1)[a_B] + sampler_VV.log_softmax(-1)[a_B, b_B]
    # the value is linear in the advantage: a completion's probability weighs it there
    experience = replace(experience, advantages_B=rewards_B * q_B.exp())
    logits_BSV = torch.stack([first_V.expand(len(pairs), V), second_VV[a_B]], dim=1)
    sampler_BSV = torch.stack([sampler_V.expand(len(pairs), V), sampler_VV[a_B]], dim=1)
    gradient_BSV, _ = gradient_of(logits_BSV, sampler_BSV, experience, head, weights, loss)
    scale = len(pairs) if isinstance(loss, Reinforce) else 2 * len(pairs)  # of the loss's mean
    second_VV = torch.zeros(V, V, dtype=torch.float64).index_add(0, a_B, gradient_BSV[:, 1])
    return -scale * torch.cat([gradient_BSV[:, 0].sum(dim=0), second_VV.flatten()])


def covariances(rewards_VV):
    """sum_t Cov_q(reward, score_t given what came before), by loops, of the two tables."""
    (first_V, second_VV), (sampler_V, sampler_VV) = tables()
    p_V, p_VV = first_V.softmax(-1), second_VV.softmax(-1)
    q_V, q_VV = sampler_V.softmax(-1), sampler_VV.softmax(-1)
    one = torch.eye(V, dtype=torch.float64)
    first, second = torch.zeros(V, dtype=torch.float64), torch.zeros(V, V, dtype=torch.float64)
    drift_V = q_V - p_V  # E_q[e_v - p]
    for a in range(V):
        for b in range(V):
            mass = q_V[a] * q_VV[a, b] * rewards_VV[a, b]
            first += mass * (one[a] - p_V - drift_V)
            second[a] += mass * (one[b] - p_VV[a] - (q_VV[a] - p_VV[a]))
    return torch.cat([first, second.flatten()])


CONSTANT = torch.full((V * V,), 2.5, dtype=torch.float64)
TRUE = torch.randn(V * V, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("loss", [Reinforce(), Dapo()])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_constant_reward_has_no_gradient(weights, loss):
    plain = expected_gradient(CONSTANT, 0, WEIGHTS[weights], loss).norm()
    centered = expected_gradient(CONSTANT, V, WEIGHTS[weights], loss).norm()
    assert centered < 1e-14
    assert plain > 0.1 or weights == "exact"  # measured: 0.33 to 0.83


@pytest.mark.parametrize("head", [2, 3, 4])
def test_a_head_of_the_sampler_leaves_little(head):
    plain = expected_gradient(CONSTANT, 0).norm()
    left = expected_gradient(CONSTANT, head).norm()
    assert left < {2: 0.6, 3: 0.5, 4: 0.3}[head] * plain


@pytest.mark.parametrize("head", [2, 4, V])
def test_with_the_exact_ratio_nothing_is_left_to_center(head):
    plain = expected_gradient(TRUE, 0, [Exact()])
    centered = expected_gradient(TRUE, head, [Exact()])
    torch.testing.assert_close(centered, plain, rtol=0, atol=1e-14)


def test_the_gradient_of_a_true_reward_is_its_covariance_with_the_score():
    centered = expected_gradient(TRUE, V)
    torch.testing.assert_close(centered, covariances(TRUE.view(V, V)), rtol=0, atol=1e-14)
    assert centered.norm() > 0.1
    # and adding a constant to the reward changes nothing
    torch.testing.assert_close(expected_gradient(TRUE + 7, V), centered, rtol=0, atol=1e-13)


# --- batches in FP32 ----------------------------------------------------------------------------


def logits_of(experience, seed, apart, vocabulary=17):
    g = torch.Generator().manual_seed(seed)
    shape = (*experience.mask_BS.shape, vocabulary)
    logits_BSV = 2 * torch.randn(shape, generator=g)
    return logits_BSV, logits_BSV + apart * torch.randn(shape, generator=g)


def by_hand(logits_BSV, sampler_BSV, experience, head, f):
    """Gradient of the centered policy gradient, token by token in float64, without autograd."""
    gradient = torch.zeros(logits_BSV.shape, dtype=torch.float64)
    drift = []
    for b, s in experience.mask_BS.nonzero().tolist():
        p = logits_BSV[b, s].double().softmax(-1)
        q = sampler_BSV[b, s].double().softmax(-1)
        y = int(experience.input_ids_BT[b, s + 1])
        chosen = sorted(range(len(q)), key=lambda v: -q[v])[:head]
        rho = (1 - sum(q[v] for v in chosen)) / (1 - sum(p[v] for v in chosen))
        mean_score = torch.zeros_like(p)
        for v in range(len(q)):  # the sampler as it is told: its head, and a tail like p's
            told = q[v] if v in chosen else rho * p[v]
            mean_score[v] += told * f(p[v] / told)
            mean_score -= told * f(p[v] / told) * p
        score = -p * f(p[y] / q[y])
        score[y] += f(p[y] / q[y])
        gradient[b, s] = -float(experience.advantages_B[b]) * (score - mean_score)
        drift.append(float(mean_score.abs().sum()) / 2)
    return gradient, sum(drift) / len(drift)


FUNCTIONS = {
    "none": lambda r: 1.0,
    "truncated": lambda r: min(r, 1.1),
    "masked": lambda r: r if 0.7 <= r <= 1.2 else 0.0,
    "rejection": lambda r: float(0.7 <= r <= 1.2),
    "truncated and rejection": lambda r: min(r, 1.1) * (0.7 <= r <= 1.3),
}


@pytest.mark.parametrize("loss", [Reinforce(), Dapo()])
@pytest.mark.parametrize("weights", FUNCTIONS)
def test_equals_an_evaluation_by_hand_in_float64(weights, loss, ragged):
    for seed in range(3):
        experience = ragged(seed)
        logits, sampler = logits_of(experience, seed, apart=0.4)
        given = (logits, sampler, experience, 5)
        got, metrics = gradient_of(*given, WEIGHTS[weights], loss)
        want, drift = by_hand(*given, FUNCTIONS[weights])
        step = experience.step
        want = want / (step.completions if isinstance(loss, Reinforce) else step.tokens)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
        assert metrics["rollout_corr/score_drift"].value() == pytest.approx(drift, rel=1e-4)


def test_drift_is_the_total_variation_distance_and_head_mass_the_head_s(ragged):
    experience = ragged(1)
    logits, sampler = logits_of(experience, 1, apart=0.4)
    p, q = logits.double().softmax(-1), sampler.double().softmax(-1)
    mask = experience.mask_BS
    for head in (4, 17, 128):
        _, metrics = gradient_of(logits, sampler, experience, head)
        mass = q.topk(min(head, 17)).values.sum(-1)[mask].mean()
        assert metrics["rollout_corr/head_mass"].value() == pytest.approx(float(mass), abs=1e-6)
    distance = (p - q).abs().sum(-1)[mask].mean() / 2
    assert metrics["rollout_corr/score_drift"].value() == pytest.approx(float(distance), rel=1e-5)


@pytest.mark.parametrize("weights", FUNCTIONS)
@pytest.mark.parametrize("head", [1, 5, 17, 128])
def test_identical_policies_have_nothing_to_center(head, weights, ragged):
    experience = ragged(2)
    logits, _ = logits_of(experience, 2, apart=0.0)
    same = (logits, logits.clone(), experience)
    plain, _ = gradient_of(*same, 0, WEIGHTS[weights], Dapo())
    centered, metrics = gradient_of(*same, head, WEIGHTS[weights], Dapo())
    assert metrics["rollout_corr/score_drift"].value() < 1e-6
    torch.testing.assert_close(centered, plain, rtol=0, atol=1e-6 * float(plain.abs().max()))


def test_a_head_of_nearly_all_the_mass_stays_finite_and_small(ragged):
    experience = ragged(3)
    logits, sampler = logits_of(experience, 3, apart=0.1)
    spike = 40.0 * torch.nn.functional.one_hot(torch.tensor(4), 17)
    given = (logits + spike, sampler + spike, experience)  # the tail's mass rounds to 0
    centered, metrics = gradient_of(*given, 3)
    plain, _ = gradient_of(*given, 0)
    assert centered.isfinite().all()
    assert metrics["rollout_corr/score_drift"].value() < 1e-6
    torch.testing.assert_close(centered, plain, rtol=0, atol=1e-6)


# --- which losses --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", plugin_names("lightning_qrl.losses"))
def test_every_loss_that_takes_it_is_a_policy_gradient_of_tokens(name, ragged):
    """On policy, where the ratio is 1: the gradient of token t's value is -A grad log p."""
    loss: Loss = load_plugin("lightning_qrl.losses", name)()
    experience = ragged(0)
    experience = replace(
        experience,
        proximal_BS=experience.logprobs_BS,
        reference_BS=torch.zeros_like(experience.logprobs_BS),
    )
    logprobs_BS = experience.logprobs_BS.clone().requires_grad_()
    values_BS, _ = loss.per_token(logprobs_BS, experience)
    weights_BS = torch.rand_like(values_BS) * experience.mask_BS
    (got_BS,) = torch.autograd.grad((weights_BS * values_BS).sum(), logprobs_BS)
    want_BS = -experience.advantages_B[:, None] * weights_BS
    assert torch.allclose(got_BS, want_BS, rtol=1e-5) == takes_centering(loss)


def takes_centering(loss):
    try:
        corrections_of(4, []).check(loss, updates=1)
    except UserError:
        return False
    return True


def test_some_losses_take_it():
    names = plugin_names("lightning_qrl.losses")
    taking = {n for n in names if takes_centering(load_plugin("lightning_qrl.losses", n)())}
    assert taking == set(names) - {"distill", "gspo"}


@pytest.mark.parametrize(
    ("weights", "loss", "updates", "message"),
    [
        ([Truncated("sequence")], Reinforce(), 1, "score_centering and weight_0: .* level=token"),
        ([Rejection("geometric")], Reinforce(), 1, "score_centering and weight_0: .* level=token"),
        ([], Distill(), 1, "loss distill has no advantages"),
        ([], Gspo(), 1, "one value for a completion"),
        ([], Dapo(), 2, "second update on a rollout.*minibatches=1"),
    ],
)
def test_what_cannot_be_centered_is_refused(weights, loss, updates, message):
    with pytest.raises(UserError, match=message):
        corrections_of(8, weights).check(loss, updates)


def test_reinforce_takes_several_updates_and_weights_of_tokens():
    corrections_of(8, [Truncated()]).check(Reinforce(), 3)
    corrections_of(8, [Truncated(), Rejection()]).check(Dapo(), 1)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_truncated_sampler_is_refused(cut):
    engine = Embedded(eos_id=1, pad_id=0, **cut)
    corrections_of(0, [Truncated()]).check_engine(engine)
    with pytest.raises(UserError, match="needs the whole distribution"):
        corrections_of(8, []).check_engine(engine)
    corrections_of(8, []).check_engine(Embedded(eos_id=1, pad_id=0))


def test_an_empty_head_is_refused():
    with pytest.raises(ValueError, match="head must be at least 1, got 0"):
        Centering(0)
