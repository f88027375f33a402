"""What importance weights did, under verl's names (its ``rollout_corr_helper.py``).

Of a weight w = f(r), over tokens unless said; at a completion's level its tokens share the ratio:

    rollout_is_mean, min, max     r itself, before it is capped or masked
    rollout_is_std                w, where verl takes r clamped into the band: the same for a cap,
    rollout_is_eff_sample_size    but for what lies below; (sum w)^2 / (N sum w^2)
    rollout_is_oob_ratio          share with w != r
    rollout_is_ratio_fraction_*   share above and below the band, [1/cap, cap] for a cap
    rollout_is_seq_mean           completion's mean r, mean over completions

Of all that takes tokens out:

    rollout_rs_masked_fraction        share of tokens that are out
    rollout_rs_seq_masked_fraction    share of completions with such a token

B completions, S predictions.
"""

import torch
from torch import Tensor

from lightning_qrl.corrections.base import Weight
from lightning_qrl.metrics import Metric, deviation, effective_share, largest, mean, smallest


@torch.no_grad()
def weight_metrics(weight: Weight, ratio: Tensor, mask_BS: Tensor) -> dict[str, Metric]:
    """What a weight did, without the prefix ``rollout_corr/``.

    Args:
        weight: the weight.
        ratio: float32 [B, S] or [B, 1], of the weight's level.
        mask_BS: bool [B, S].
    """
    ratio_BS = ratio.expand_as(mask_BS)
    ratio_N = ratio_BS[mask_BS]
    weight_N = weight(ratio_N)
    everywhere = torch.ones_like(ratio_N, dtype=torch.bool)
    low, high = weight.band
    length_B = mask_BS.sum(dim=1)
    mean_B = (ratio_BS * mask_BS).sum(dim=1) / length_B.clamp_min(1)
    metrics = {
        "mean": mean(ratio_N, everywhere),
        "min": smallest(ratio_N),
        "max": largest(ratio_N),
        "std": deviation(weight_N, everywhere),
        "eff_sample_size": effective_share(weight_N.log(), everywhere),
        "oob_ratio": mean(weight_N != ratio_N, everywhere),
        "ratio_fraction_high": mean(ratio_N > high, everywhere),
        "ratio_fraction_low": mean(ratio_N < low, everywhere),
        "seq_mean": mean(mean_B, length_B > 0),
    }
    return {f"rollout_is_{name}": metric for name, metric in metrics.items()}


@torch.no_grad()
def rejection_metrics(kept: Tensor, mask_BS: Tensor) -> dict[str, Metric]:
    """What was taken out, without the prefix ``rollout_corr/``.

    Args:
        kept: float32 [B, S] or [B, 1], 0 for what is out.
        mask_BS: bool [B, S].
    """
    out_BS = (kept == 0).expand_as(mask_BS)
    return {
        "rollout_rs_masked_fraction": mean(out_BS, mask_BS),
        "rollout_rs_seq_masked_fraction": mean((out_BS & mask_BS).any(dim=1), mask_BS.any(dim=1)),
    }
