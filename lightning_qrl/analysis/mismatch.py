"""How far the trainer's policy is from the sampler's, on the tokens that were sampled.

With d_t = log pi_trainer(token_t) - log pi_sampler(token_t), means over tokens unless said:

    sampling/sampling_logp_difference     |d|                (TRL's names, under train/)
    sampling/importance_sampling_ratio    e^d
    kl       -d                k3_kl    e^d - d - 1          (verl's names, under rollout_corr/)
    chi2_token   e^2d - 1      chi2_seq   e^(2 sum_t d) - 1, mean over completions
    *_log_ppl    minus the mean log-probability of a completion, mean over completions
    log_ppl_diff, ppl_ratio   the same of the mean d of a completion

    ess_token, ess_seq   (sum w)^2 / (N sum w^2), the effective sample size as a share of N tokens
                         with w = e^d, or of N completions with w = e^(sum_t d_t)
    extreme_fraction     share of tokens with max(w, 1/w) > 2: F(2) of R3 (arXiv 2510.11370)

On the first update after the sampler got the trainer's weights, all of this is numerics:
quantization, the key-value cache, the order of sums. On later updates the policy's own change adds
to it. d and sum_t d are clamped to +-20 before they are exponents, as in verl, but not in the
effective sample sizes: there, all weights beyond the clamp would be alike, and all seem well.
"""

import math

import torch
from torch import Tensor

from lightning_qrl.experience import Experience
from lightning_qrl.metrics import Metric, effective_share, largest, mean, smallest

LIMIT = 20.0
EXTREME = 2.0


@torch.no_grad()
def sampling_mismatch(logprobs_BS: Tensor, experience: Experience) -> dict[str, Metric]:
    """TRL's ``sampling/*`` metrics.

    Args:
        logprobs_BS: float32 [B, S], the trainer's log-probabilities.
        experience: the batch, with the sampler's.
    """
    difference = (logprobs_BS - experience.logprobs_BS)[experience.mask_BS]
    ratio = _exp(difference)
    everywhere = torch.ones_like(ratio, dtype=torch.bool)
    return {
        "sampling/sampling_logp_difference/mean": mean(difference.abs(), everywhere),
        "sampling/sampling_logp_difference/max": largest(difference.abs()),
        "sampling/importance_sampling_ratio/min": smallest(ratio),
        "sampling/importance_sampling_ratio/mean": mean(ratio, everywhere),
        "sampling/importance_sampling_ratio/max": largest(ratio),
    }


@torch.no_grad()
def rollout_correction(logprobs_BS: Tensor, experience: Experience) -> dict[str, Metric]:
    """Verl's off-policy metrics, without their prefix ``rollout_corr/``.

    Args:
        logprobs_BS: float32 [B, S], the trainer's log-probabilities.
        experience: the batch, with the sampler's.
    """
    mask_BS = experience.mask_BS
    d_BS = (logprobs_BS - experience.logprobs_BS).masked_fill(~mask_BS, 0.0)
    length_B = mask_BS.sum(dim=1)
    some_B = length_B > 0
    length_B = length_B.clamp_min(1)
    trainer_B = -(logprobs_BS * mask_BS).sum(dim=1) / length_B
    sampler_B = -(experience.logprobs_BS * mask_BS).sum(dim=1) / length_B
    gap_B = trainer_B - sampler_B
    ratio_BS, total_B = _exp(d_BS), d_BS.sum(dim=1)
    return {
        "kl": mean(-d_BS, mask_BS),
        "k3_kl": mean(ratio_BS - d_BS - 1, mask_BS),
        "chi2_token": mean(ratio_BS.square() - 1, mask_BS),
        "chi2_seq": mean(_exp(total_B).square() - 1, some_B),
        "ess_token": effective_share(d_BS, mask_BS),
        "ess_seq": effective_share(total_B, some_B),
        "extreme_fraction": mean(d_BS.abs() > math.log(EXTREME), mask_BS),
        "training_log_ppl": mean(trainer_B, some_B),
        "training_ppl": mean(_exp(trainer_B), some_B),
        "rollout_log_ppl": mean(sampler_B, some_B),
        "rollout_ppl": mean(_exp(sampler_B), some_B),
        "log_ppl_diff": mean(gap_B, some_B),
        "log_ppl_abs_diff": mean(gap_B.abs(), some_B),
        "log_ppl_diff_max": largest(gap_B[some_B]),
        "log_ppl_diff_min": smallest(gap_B[some_B]),
        "ppl_ratio": mean(_exp(gap_B), some_B),
    }


def _exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-LIMIT, LIMIT).exp()
