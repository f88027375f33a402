"""Corrected losses in float64, token by token, with nothing of the package in them.

`corrected` gives the loss of a batch that is a whole optimizer step, differentiable in the
log-probabilities it is given.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LIMIT = 20.0
COUNTS = {  # what a loss is divided by
    "tokens": {"dapo", "bnpo", "cispo", "distill"},
    "completions, then their tokens": {"grpo", "gspo", "gspo_token", "sapo"},
    "completions": {"reinforce"},
    "completions and the limit": {"dr_grpo"},
}
CLIPS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "gspo_token": (3e-4, 4e-4)}


def truncated(cap: float) -> Callable[[float], float]:
    return lambda r: min(r, cap)


def masked(low: float, high: float) -> Callable[[float], float]:
    return lambda r: r if low <= r <= high else 0.0


def rejection(low: float, high: float) -> Callable[[float], float]:
    return lambda r: 1.0 if low <= r <= high else 0.0


def bounded(x: float) -> float:
    return max(-LIMIT, min(LIMIT, x))


def ratios(d_N: list[float], level: str) -> list[float]:
    """The ratio of each token of a completion, from its log-ratios."""
    if level == "token":
        return [math.exp(bounded(d)) for d in d_N]
    total = math.fsum(d_N)
    return [math.exp(bounded(total if level == "sequence" else total / len(d_N)))] * len(d_N)


def clipped(name: str, ratio: Tensor, advantage: Tensor) -> Tensor:
    low, high = CLIPS.get(name, (0.2, 0.2))
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def token_values(
    name: str, lp_N: Tensor, anchor_N: Tensor, sampler_N: Tensor, teacher_N: Tensor, a: Tensor
) -> Tensor:
    """The values of one completion's tokens under a loss with its default options."""
    rho_N = (lp_N - anchor_N).exp()
    if name == "reinforce":
        return -a * lp_N
    if name == "cispo":
        return -rho_N.detach().clamp_max(5.0) * a * lp_N
    if name == "distill":
        return rho_N * (sampler_N - teacher_N)
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -4 / tau * torch.sigmoid(tau * (rho_N - 1)) * a
    if name in ("gspo", "gspo_token"):
        s = (lp_N - anchor_N).mean().exp()
        s_N = s.expand(len(lp_N))
        if name == "gspo_token":
            s_N = s.detach() * lp_N.exp() / lp_N.exp().detach()
        return clipped(name, s_N, a)
    return clipped(name, rho_N, a)


def corrected(
    name: str,
    weights: list[tuple[Callable[[float], float], str]],
    lp_BS: Tensor,
    e,
    anchor: str,
) -> Tensor:
    """The loss of a step.

    Args:
        name: of the loss.
        weights: functions of the ratio, each with its level.
        lp_BS: float64 log-probabilities of the policy that is trained.
        e: the experience.
        anchor: what the loss's own ratio is against, ``sampler``, ``now`` or ``proximal``; the
            weights' ratio is of proximal where that is it, else of now.
    """
    parts, tokens, completions = [], 0, 0
    for b in range(len(e)):
        m = e.mask_BS[b]
        n = int(m.sum())
        if not n:
            continue
        tokens, completions = tokens + n, completions + 1
        lp_N, sampler_N = lp_BS[b][m], e.logprobs_BS[b][m].double()
        now_N = lp_N.detach()
        trainer_N = e.proximal_BS[b][m].double() if anchor == "proximal" else now_N
        anchor_N = sampler_N if anchor == "sampler" else trainer_N
        teacher_N = e.reference_BS[b][m].double()
        a = e.advantages_B[b].double()
        value_N = token_values(name, lp_N, anchor_N, sampler_N, teacher_N, a)
        d_N = (trainer_N - sampler_N).tolist()
        for f, level in weights:
            value_N = value_N * torch.tensor([f(r) for r in ratios(d_N, level)]).double()
        by_token = name in COUNTS["completions, then their tokens"]
        parts.append(value_N.sum() / (n if by_token else 1))
    total = torch.stack(parts).sum()
    if name in COUNTS["tokens"]:
        return total / tokens
    return total / completions / (e.max_new_tokens if name == "dr_grpo" else 1)
