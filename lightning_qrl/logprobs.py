"""Token log-probabilities and entropy from logits, in FP32, chunk by chunk.

The temperature divides the logits, as it does in the sampler: the policy that is trained is then
the very distribution that was sampled, and importance ratios start at 1 at any temperature.

B sequences, S predicted tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096  # tokens whose intermediate FP32 results exist at one time


def token_logprobs(
    logits_BSV: Tensor, targets_BS: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the target tokens, and the entropy of each prediction.

    Args:
        logits_BSV: [B, S, V], any floating dtype.
        targets_BS: int64 [B, S].
        temperature: divides the logits; greater than 0.

    Returns:
        Log-probabilities, float32 [B, S], with gradient; entropy in nats, float32 [B, S], without.
    """
    logits = torch.split(logits_BSV.flatten(0, 1), CHUNK)
    targets = torch.split(targets_BS.flatten(), CHUNK)
    parts = [_chunk(lg, t, temperature) for lg, t in zip(logits, targets, strict=True)]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs).view_as(targets_BS), torch.cat(entropies).view_as(targets_BS)


def _chunk(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs_NV = F.log_softmax(logits_NV.float() / temperature, dim=-1)
    chosen_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
    with torch.no_grad():
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(dim=-1)
    return chosen_N, entropy_N
