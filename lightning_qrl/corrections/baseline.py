"""The baseline of least variance for weighted samples (VCPO's OPOB, arXiv 2602.17616).

    b* = sum_i w_i^2 |g_i|^2 R_i / sum_i w_i^2 |g_i|^2        over a group
    A_i = (R_i - b*) / spread

w_i is the completion's importance ratio, not truncated (as its authors have it by default), and g_i
the gradient of its log-probability. Advantages are rewards less a constant of the group, over a
spread, so that b* need not know either: A_i minus its own weighted mean is the same (times G/(G-1)
under ``baseline: leave_one_out``, which scales advantages so).

Deviation: the authors run one backward a completion for |g_i|. Here |g_i|^2 stands for the squared
gradient with respect to the logits, which a forward pass knows already:

    |g_i|^2 ~ sum_t |e_y - p_t|^2 = sum_t (1 - 2 p_t(y) + sum_v p_t(v)^2)

It follows the exact one in rank (a test measures how well), and any weights give a valid baseline:
the estimate of the gradient has the same expectation, only the variance is not the very least.

Also with identical weights on both sides this is another baseline than the group's mean: where
gradients differ in length it changes the gradient of a step, on purpose.

B completions, S predictions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience
from lightning_qrl.logprobs import Scores
from lightning_qrl.losses.base import Loss


@dataclass(frozen=True)
class MinimumVariance:
    """Advantages about the group's baseline of least variance."""

    def check(self, loss: Loss, whole_groups: bool, *, by: str) -> None:
        """Raise UserError where there is nothing to rebase, or no group to do it in."""
        if not loss.learns_from_rewards:
            name = type(loss).__name__.lower()
            raise UserError(
                f"callbacks.{by}.baseline: loss {name} does not learn from rewards; set it to false"
            )
        if not whole_groups:
            raise UserError(
                f"callbacks.{by}.baseline: it needs whole groups in every micro-batch: minibatches "
                "1, leverage 1, and accumulate_grad_batches that divides each rank's prompts of a "
                "rollout; change these, or set it to false"
            )

    @torch.no_grad()
    def __call__(self, log_ratio_B: Tensor, scores: Scores, experience: Experience) -> Tensor:
        """Advantages, float32 [B]; those of completions without a reward stay as they are.

        Args:
            log_ratio_B: float32 [B], log of each completion's importance ratio, of any size: the
                largest of a group counts as 1.
            scores: what the trainer makes of the tokens.
            experience: the micro-batch; it holds whole groups.
        """
        known_B = experience.rewards_B.isfinite()
        squares_B = squared_gradients(scores, experience.mask_BS).double()
        same = experience.group_B[:, None] == experience.group_B
        log_B = log_ratio_B.double().masked_fill(~known_B, -torch.inf)
        largest_B = log_B.expand_as(same).masked_fill(~same, -torch.inf).amax(dim=1)
        apart_B = (log_B - largest_B).masked_fill(~known_B, -torch.inf)
        weight_B = (2 * apart_B).exp() * squares_B
        advantages_B, same_BB = experience.advantages_B.double(), same.double()
        norm_B = same_BB @ weight_B
        baseline_B = same_BB @ (weight_B * advantages_B) / norm_B.masked_fill(norm_B == 0, 1.0)
        rebased_B = advantages_B - baseline_B.masked_fill(~known_B, 0.0)
        return rebased_B.to(experience.advantages_B.dtype)


def squared_gradients(scores: Scores, mask_BS: Tensor) -> Tensor:
    """Squared norm of each completion's gradient with respect to its logits, float32 [B]."""
    squares_BS = 1 - 2 * scores.logprobs.detach().exp() + scores.collision
    return squares_BS.masked_fill(~mask_BS, 0.0).sum(dim=1)
