"""DAPO's token-level clipped loss (Yu et al., arXiv 2503.14476, equation 8).

    L = - sum_i sum_t min( rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i ) / N,
    rho_it = pi(token_it) / pi_sampler(token_it)

N counts the sampled tokens of the whole optimizer step (all micro-batches, all ranks), so a long
completion weighs as much as its tokens and no split of the batch changes the gradient. The ratio is
against the policy that sampled, also in the second and later updates on a rollout.

On the first update the ratio is 1 and the advantages of a group sum to 0, so the loss is near 0
while its gradient is not: progress shows in the reward, not in the loss.
"""

import torch
from torch import Tensor

from lightning_qrl.experience import Experience
from lightning_qrl.losses.base import importance_ratio
from lightning_qrl.metrics import Metric, mean


def dapo(
    logprobs_BS: Tensor, experience: Experience, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Metric]]:
    """Token-level clipped policy loss; see the module's text for equation and denominator.

    Args:
        logprobs_BS: float32 [B, S], log-probabilities under the policy that is trained.
        experience: the micro-batch.
        clip_low: the importance ratio is clipped below 1 - clip_low.
        clip_high: the importance ratio is clipped above 1 + clip_high.

    Returns:
        The micro-batch's share of the loss (a scalar), and the shares of tokens whose gradient the
        clip removed: below for A < 0, above for A > 0, and both.
    """
    mask_BS = experience.mask_BS
    ratio_BS = importance_ratio(logprobs_BS, experience)
    advantages_B1 = experience.advantages_B[:, None]
    clipped_BS = ratio_BS.clamp(1 - clip_low, 1 + clip_high)
    objective_BS = torch.minimum(ratio_BS * advantages_B1, clipped_BS * advantages_B1)
    loss = -objective_BS.masked_fill(~mask_BS, 0.0).sum() / max(experience.step_tokens, 1)
    with torch.no_grad():
        low_BS = (ratio_BS < 1 - clip_low) & (advantages_B1 < 0)
        high_BS = (ratio_BS > 1 + clip_high) & (advantages_B1 > 0)
        metrics = {
            "clip_ratio/low_mean": mean(low_BS, mask_BS),
            "clip_ratio/high_mean": mean(high_BS, mask_BS),
            "clip_ratio/region_mean": mean(low_BS | high_BS, mask_BS),
        }
    return loss, metrics
