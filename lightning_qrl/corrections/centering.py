"""Score centering: subtract what the sampler's own distribution makes of the gradient.

Marek & Ryabinin (arXiv 2609.20807). At one token, with the sampler's probabilities q, the trainer's
p and the score s_v = grad log p_v, the expected gradient of a reward R is

    E_q[R s] = E_q[R] E_q[s] + Cov_q(R, s),        E_q[s] = sum_v q_v s_v

The first term is drift: whatever the reward, it pulls the trainer toward the sampler, and it is 0
only where q = p. Centering takes it out. With importance weights f(p / q) the score is f s, and

    loss_t = - A ( f(p_y / q_y) log p_y - c ),     grad c = E_q[f s]

The sampler tells q of its likeliest tokens H alone; the others are taken to be as in the trainer,
scaled to the mass that is left (rho). As sum_v p_v s_v = 0, the head is enough:

    rho = (1 - sum_H q) / (1 - sum_H p),    alpha = rho f(1 / rho)
    c   = sum_H sg[ q_v f(p_v / q_v) - alpha p_v ] log p_v

sg stops the gradient. f is the product of the token weights in the stack: beside
`truncated_importance_sampling` this is the paper's SC+TIS, `masked_importance_sampling` makes its
masked variant, alone f = 1. With f(r) = r, c has no gradient: exact importance sampling does not
drift. A mass below `EPSILON` counts as `EPSILON`, so with the whole vocabulary in the head rho = 1;
alpha sum_v p_v s_v is then 0 whatever alpha is. Where the trainer's tail alone is that small, and
the sampler's is not, rho is held down, and the drift into the tail stays.

What drift there was is measured as half the L1 norm of dc/dlogits, k_v = q_v f - alpha p_v:

    score_drift = ( sum_H |k_v - K p_v| + |K| (1 - sum_H p) ) / 2,    K = sum_H k_v

With f = 1 that is the total variation distance of sampler and trainer, their tails as one token.

B completions, S predictions, N sampled tokens, K head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_qrl.corrections.base import Weight
from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience
from lightning_qrl.logprobs import Scores
from lightning_qrl.losses.base import LIMIT, Loss
from lightning_qrl.metrics import Metric, mean

EPSILON = 1e-6  # the least mass of a tail


@dataclass(frozen=True)
class Centering:
    """Takes the sampler's expected score out of the gradient.

    Attributes:
        head: likeliest tokens of the sampler that are told apart; the paper has 128, and as good
            results with 32. All of a vocabulary that is not larger.

    Raises:
        ValueError: the head is empty.
    """

    head: int = 128

    def __post_init__(self) -> None:
        if self.head < 1:
            raise ValueError(f"head must be at least 1, got {self.head}")

    def check(self, loss: Loss, updates: int, weights: Mapping[str, Weight], *, by: str) -> None:
        """Raise UserError where what is subtracted is not the drift of what the loss does.

        Args:
            loss: what is corrected.
            updates: optimizer steps on one rollout.
            weights: the importance weights beside it, by who asked for them.
            by: the callback that asks for the centering.
        """
        # what is left gives each token the gradient -A f grad log p, as the tests try
        name = type(loss).__name__.lower()
        for other, weight in weights.items():
            if weight.level != "token":
                raise UserError(
                    f"callbacks {by} and {other}: the drift of a token is known for weights of "
                    f"tokens alone; set level=token for {other}, or take one of them out"
                )
        if not loss.learns_from_rewards:
            raise UserError(f"{by}: loss {name} has no advantages whose drift could be taken out")
        if loss.uses_ratio and updates > 1:
            raise UserError(
                f"{by}: from the second update on a rollout, loss {name} weighs and clips by a "
                "ratio of its own, whose drift is another; set grpo.minibatches=1 and "
                "num_iterations=1, or grpo.loss=reinforce"
            )
        if "token" not in loss.levels:
            raise UserError(
                f"{by}: loss {name} has one value for a completion, and the drift is that of each "
                "token; use another one, such as gspo_token or dapo"
            )

    def __call__(
        self, scores: Scores, experience: Experience, weights: Sequence[Weight]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """What c is at each token, float32 [B, S], and metrics as under ``rollout_corr/``.

        Args:
            scores: what the trainer makes of the tokens, those of the head too.
            experience: the micro-batch, with the sampler's head.
            weights: functions of a token's ratio, whose product is f.
        """
        assert scores.head is not None, "the trainer scored no head"
        assert experience.head_logprobs_BSK is not None, "the sampler told no head"
        mask_BS = experience.mask_BS
        logp_NK, logq_NK = scores.head[mask_BS], experience.head_logprobs_BSK[mask_BS]
        k_NK, metrics = _coefficients(logp_NK.detach(), logq_NK, weights)
        c_N = (k_NK * logp_NK).sum(dim=-1)
        return torch.zeros_like(scores.logprobs).masked_scatter(mask_BS, c_N), metrics


@torch.no_grad()
def _coefficients(
    logp_NK: Tensor, logq_NK: Tensor, weights: Sequence[Weight]
) -> tuple[Tensor, dict[str, Metric]]:
    """The factors q f(p / q) - alpha p, float32 [N, K], and metrics."""

    def f(ratio: Tensor) -> Tensor:
        return reduce(torch.mul, (weight(ratio) for weight in weights), torch.ones_like(ratio))

    p_NK, q_NK = logp_NK.exp(), logq_NK.exp()
    # in float64: a tail may be smaller than the rounding of a sum in FP32
    tail_p_N1 = 1 - p_NK.sum(dim=-1, keepdim=True, dtype=torch.float64)
    tail_q_N1 = 1 - q_NK.sum(dim=-1, keepdim=True, dtype=torch.float64)
    rho_N1 = (tail_q_N1.clamp_min(EPSILON) / tail_p_N1.clamp_min(EPSILON)).to(logp_NK)
    alpha_N1 = rho_N1 * f(1 / rho_N1)
    ratio_NK = (logp_NK - logq_NK).clamp(-LIMIT, LIMIT).exp()
    k_NK = q_NK * f(ratio_NK) - alpha_N1 * p_NK
    sum_N1 = k_NK.sum(dim=-1, keepdim=True)
    in_head_N = (k_NK - sum_N1 * p_NK).abs().sum(dim=-1)
    in_tail_N = (sum_N1.abs() * tail_p_N1.clamp_min(0))[:, 0]
    every_N = torch.ones_like(in_tail_N, dtype=torch.bool)
    return k_NK, {
        "head_mass": mean(1 - tail_q_N1[:, 0].clamp_min(0), every_N),
        "score_drift": mean((in_head_N + in_tail_N) / 2, every_N),
    }
