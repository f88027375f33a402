"""All that is measured of a micro-batch when it is trained on.

B completions, S predictions.
"""

from lightning_qrl.analysis.mismatch import rollout_correction, sampling_mismatch
from lightning_qrl.analysis.staleness import staleness
from lightning_qrl.experience import Experience
from lightning_qrl.logprobs import Scores
from lightning_qrl.metrics import Metric, mean


def batch_metrics(
    scores: Scores, experience: Experience, version: int, largest_lag: int
) -> dict[str, Metric]:
    """Metrics by their full names.

    Args:
        scores: what the trainer makes of the tokens.
        experience: the micro-batch.
        version: of the weights that are trained.
        largest_lag: versions that a token can be behind these.
    """
    mask_BS, logprobs_BS = experience.mask_BS, scores.logprobs.detach()
    sampling = sampling_mismatch(logprobs_BS, experience)
    correction = rollout_correction(logprobs_BS, experience)
    return {
        **{f"train/{name}": metric for name, metric in sampling.items()},
        **{f"rollout_corr/{name}": metric for name, metric in correction.items()},
        **staleness(logprobs_BS, experience, version, largest_lag),
        "train/entropy": mean(scores.entropy, mask_BS),
        "train/num_completions": Metric("sum", float(mask_BS.any(dim=1).sum())),
        "num_tokens": Metric("sum", float(mask_BS.sum())),
    }
