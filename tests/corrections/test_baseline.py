"""The baseline of least variance against float64 loops, and what stands for gradient norms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from lightning_qrl.corrections.baseline import MinimumVariance, squared_gradients
from lightning_qrl.corrections.weights import Truncated
from lightning_qrl.experience import make_experience, split_for_updates
from lightning_qrl.logprobs import Scores
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.objective import Objective
from lightning_qrl.policy import Policy
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.scoring import Scorer
from lightning_qrl.tasks.arithmetic import Arithmetic

V = 7


def random_scores(logprobs, seed=0):
    """Scores of distributions over seven tokens, the sampled one of the given probability."""
    g = torch.Generator().manual_seed(seed)
    others_BSV = torch.rand(*logprobs.shape, V - 1, generator=g)
    rest_BS = 1 - logprobs.detach().exp().clamp_max(0.99)
    others_BSV = others_BSV / others_BSV.sum(dim=-1, keepdim=True) * rest_BS[..., None]
    p_BSV = torch.cat([1 - rest_BS[..., None], others_BSV], dim=-1)
    collision_BS = p_BSV.square().sum(dim=-1)
    return Scores(p_BSV[..., 0].log().requires_grad_(), collision_BS, collision_BS), p_BSV


def by_hand(p_BSV, e):
    """Advantages about b*, of rewards that were divided by the group's deviation, in loops."""
    got = [0.0] * len(e)
    for group in sorted(set(e.group_B.tolist())):
        rows = [b for b in range(len(e)) if int(e.group_B[b]) == group]
        rows = [b for b in rows if not math.isnan(e.rewards_B[b])]
        total = norm = 0.0
        for b in rows:
            squares = log_ratio = 0.0
            for s in e.mask_BS[b].nonzero()[:, 0].tolist():
                p = p_BSV[b, s].double().tolist()
                squares += sum((float(v == 0) - x) ** 2 for v, x in enumerate(p))
                log_ratio += math.log(p[0]) - float(e.logprobs_BS[b, s])
            weight = math.exp(2 * log_ratio) * squares
            total, norm = total + weight * float(e.advantages_B[b]), norm + weight
        for b in rows:
            got[b] = float(e.advantages_B[b]) - (total / norm if norm else 0.0)
    return torch.tensor(got)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_about_the_groups_baseline(seed, apart):
    logprobs, e = apart(seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    e = replace(e, group_B=e.group_B[order])  # groups need not lie side by side
    e.rewards_B[3], e.advantages_B[3] = math.nan, 0.0
    scores, p_BSV = random_scores(logprobs, seed)
    objective = Objective(Dapo())
    objective.corrections.add(MinimumVariance(), by="vcpo")
    got = objective.corrections.rebased(scores, e).advantages_B
    torch.testing.assert_close(got, by_hand(p_BSV, e), rtol=1e-4, atol=1e-5)
    assert float(got[3]) == 0.0
    assert not torch.allclose(got, e.advantages_B, atol=1e-3)


def test_ratios_beyond_any_float_weigh_by_what_they_are_apart(apart):
    logprobs, e = apart(4)
    scores, _ = random_scores(logprobs)
    log_ratio_B = torch.randn(8)
    want = MinimumVariance()(log_ratio_B, scores, e)
    for shift in (-500.0, 500.0):
        got = MinimumVariance()(log_ratio_B + shift, scores, e)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_any_baseline_and_scale_of_the_rewards_leads_to_the_same(apart):
    logprobs, e = apart(4)
    scores, _ = random_scores(logprobs)
    log_ratio_B = (torch.rand(8) + 0.5).log()
    spread, group_mean = 0.3, 5.0
    rewards = e.advantages_B * spread + group_mean
    raw = MinimumVariance()(log_ratio_B, scores, replace(e, advantages_B=rewards)) / spread
    torch.testing.assert_close(MinimumVariance()(log_ratio_B, scores, e), raw, rtol=1e-4, atol=1e-5)


def test_groups_of_equal_rewards_keep_exactly_nothing(apart):
    logprobs, e = apart(5)
    scores, _ = random_scores(logprobs)
    e = replace(e, advantages_B=torch.zeros(8))
    assert not MinimumVariance()(torch.rand(8), scores, e).any()


def test_it_leaves_the_ratio_of_the_loss_alone(apart, scores_of):
    logprobs, e = apart(6)
    plain, based = Objective(Dapo()), Objective(Dapo())
    based.corrections.add(MinimumVariance(), by="vcpo")
    scores = scores_of(logprobs)
    rebased = based.corrections.rebased(scores, e)
    assert torch.equal(based(scores, e)[0], plain(scores, rebased)[0])


def test_micro_batches_of_whole_groups_change_no_gradient(apart):
    logprobs, e = apart(7)
    scores, _ = random_scores(logprobs)
    objective = Objective(Dapo())
    objective.corrections.add(MinimumVariance(), by="vcpo")
    objective.corrections.add(Truncated("sequence", 8.0), by="tis")
    leaf = scores.logprobs
    objective(scores, e)[0].backward()
    whole, index = leaf.grad.clone(), torch.arange(8)
    for parts in (2, 4):
        leaf.grad = None
        batches = split_for_updates(e, [index], parts)
        for batch, rows in zip(batches, index.tensor_split(parts), strict=True):
            width = batch.mask_BS.shape[1]
            mine = Scores(*(t[rows][:, :width] for t in scores[:3]))
            (objective(mine, batch)[0] * batch.step.scale / parts).backward()
        torch.testing.assert_close(leaf.grad, whole, rtol=1e-5, atol=1e-8)


def norms_of(model, experience):
    """What stands for |grad log p|^2 of each completion, and the exact one, numpy [B]."""
    scorer = Scorer(model, shared_prefix=False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    stands, exact = [], []
    for b in range(len(experience)):
        one = experience.take(torch.tensor([b]))
        scores = scorer(one, 1.0)
        stands.append(float(squared_gradients(scores, one.mask_BS)))
        gradient = torch.autograd.grad(scores.logprobs[one.mask_BS].sum(), parameters)
        exact.append(sum(float(g.double().square().sum()) for g in gradient))
    return np.array(stands), np.array(exact)


def baselines(weights_PG, rewards_PG):
    return (weights_PG * rewards_PG).sum(axis=1) / weights_PG.sum(axis=1)


@pytest.mark.slow
def test_it_follows_the_exact_gradient_norms_of_the_embedded_policy():
    """Measured: rank correlation 0.92; distance from the exact b* 0.07, that of the mean 0.20."""
    policy = Policy("embedded")
    model = policy.build().train()
    engine = Embedded(eos_id=policy.eos_id, pad_id=policy.pad_id, max_new_tokens=8)
    engine.sync(model, 0)
    prompts = Arithmetic(difficulty=2).prompts("train")[:12]
    completions = engine.generate([policy.encode(p.text) for p in prompts], samples=16, seed=0)
    zeros_B = torch.zeros(len(completions))
    e = make_experience(completions, zeros_B, zeros_B, policy.pad_id, group_size=16)
    stands, exact = norms_of(model, e)
    assert spearmanr(stands, exact).statistic > 0.8
    draw = np.random.default_rng(0)
    stands, exact = (np.tile(x.reshape(12, 16), (200, 1)) for x in (stands, exact))
    rewards = (draw.random(exact.shape) < draw.random((len(exact), 1))).astype(float)
    best = baselines(exact, rewards)
    apart = np.sqrt(np.mean((baselines(stands, rewards) - best) ** 2))
    assert apart < np.sqrt(np.mean((rewards.mean(axis=1) - best) ** 2)) / 2
