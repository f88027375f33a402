"""How old the weights are that the tokens of a batch were sampled with, and what that costs.

The lag of a token is the number of optimizer steps between the weights that sampled it and those
that are trained. Lags 0 to 7 have a bucket each, from 8 on each bucket is twice as wide as the one
before: lag_8_15, lag_16_31, .. For each bucket: its share of the tokens, and the mean k3 estimate
of KL(sampler, trainer) over them, e^d - d - 1 with d = log pi_trainer - log pi_sampler.

B completions, S predictions, N tokens, K buckets.
"""

import math

import torch
from torch import Tensor

from lightning_qrl.analysis.mismatch import LIMIT
from lightning_qrl.experience import Experience
from lightning_qrl.metrics import Metric

SINGLE = 8  # lags with a bucket of their own; a power of two


@torch.no_grad()
def staleness(
    logprobs_BS: Tensor, experience: Experience, version: int, largest: int
) -> dict[str, Metric]:
    """The metrics ``async/staleness*`` and ``async/k3_kl/*`` by their full names.

    Args:
        logprobs_BS: float32 [B, S], the trainer's log-probabilities.
        experience: the batch.
        version: of the weights that are trained.
        largest: the largest lag there can be. Every bucket up to its own has a share, be it 0, so
            that shares add up to 1 over micro-batches and ranks; a bucket without tokens has no KL.
    """
    mask_BS = experience.mask_BS
    lag_N = (version - experience.versions_BS)[mask_BS].cpu()
    d_N = (logprobs_BS - experience.logprobs_BS)[mask_BS].cpu().double().clamp(-LIMIT, LIMIT)
    bucket_N = _buckets(lag_N.clamp_min(0))
    count = int(_buckets(torch.tensor([largest]))) + 1
    tokens_K = bucket_N.bincount(minlength=count).tolist()
    k3_K = bucket_N.bincount(d_N.exp() - d_N - 1, minlength=count).tolist()
    total = float(len(lag_N))
    metrics = {
        "async/staleness_mean": Metric("mean", float(lag_N.sum()), total),
        "async/staleness_max": Metric("max", float(lag_N.max()) if total else 0.0, min(total, 1)),
    }
    for bucket, (tokens, k3) in enumerate(zip(tokens_K, k3_K, strict=True)):
        name = bucket_name(bucket)
        metrics[f"async/staleness/{name}"] = Metric("mean", tokens, total)
        if tokens:
            metrics[f"async/k3_kl/{name}"] = Metric("mean", k3, tokens)
    return metrics


_OFFSET = SINGLE - int(math.log2(SINGLE))


def _buckets(lag_N: Tensor) -> Tensor:
    """The number of each lag's bucket."""
    exponent_N = lag_N.clamp_min(1).double().log2().long()
    return torch.where(lag_N < SINGLE, lag_N, exponent_N + _OFFSET)


def bucket_name(bucket: int) -> str:
    """``lag_3``, or ``lag_8_15``."""
    if bucket < SINGLE:
        return f"lag_{bucket}"
    first = 2 ** (bucket - _OFFSET)
    return f"lag_{first}_{2 * first - 1}"
