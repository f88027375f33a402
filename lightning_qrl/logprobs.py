"""Token log-probabilities and entropy, in FP32, chunk by chunk.

The temperature divides the logits, as it does in the sampler: the policy that is trained is then
the very distribution that was sampled, and importance ratios start at 1 at any temperature. Where
the sampler cut the distribution off (top_p, top_k, min_p), the same tokens are left here.

Logits of N tokens over V entries are the largest thing in training: at 50 000 entries and 4096
tokens, 0.8 GB in FP32, several times over. So only `CHUNK` of their numbers exist at one time:
each chunk goes through the head, is reduced to one number a token, and is computed again for the
gradient. What fits into one chunk is kept instead.

B sequences, S predicted tokens, N tokens, H hidden, V vocabulary, K kept tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 2**24  # logits, tokens x vocabulary, that exist at one time: 64 MiB in FP32


class Scores(NamedTuple):
    """What a policy makes of sampled tokens; "..." is N for a flat list, B, S for a batch.

    Attributes:
        logprobs: float32 [...], log-probabilities of the sampled tokens, with gradient.
        entropy: float32 [...], in nats, of the distribution that is sampled, without gradient.
        collision: float32 [...], sum of its squared probabilities, without gradient.
        head: float32 [..., K], log-probabilities of further tokens, with gradient; None: not asked.
    """

    logprobs: Tensor
    entropy: Tensor
    collision: Tensor
    head: Tensor | None = None


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
    rows = logits_BSV.flatten(0, 1)
    scores = head_logprobs(rows, _identity, rows.shape[-1], targets_BS.flatten(), temperature)
    return scores.logprobs.view_as(targets_BS), scores.entropy.view_as(targets_BS)


def head_logprobs(
    hidden_NH: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    targets_N: Tensor,
    temperature: float = 1.0,
    kept_NK: Tensor | None = None,
    head_NK: Tensor | None = None,
) -> Scores:
    """Log-probabilities of the target tokens from what the head of a model reads.

    Memory grows with N and with `CHUNK`, not with N x V.

    Args:
        hidden_NH: [N, H], any floating dtype.
        head: makes logits [n, V] from rows of it, each row by itself.
        vocabulary: V.
        targets_N: int64 [N].
        temperature: divides the logits; greater than 0.
        kept_NK: int64 [N, K], tokens that the sampler could choose, filled up with -1; None: all.
        head_NK: int64 [N, K], tokens whose log-probabilities are wanted too; not with ``kept_NK``.
    """
    assert kept_NK is None or head_NK is None, "the head of a truncated distribution"
    size = max(1, CHUNK // vocabulary)
    chunks = [slice(first, first + size) for first in range(0, len(targets_N), size)]
    parts = []
    for rows in chunks or [slice(0)]:
        kept, wanted = (None if ids is None else ids[rows] for ids in (kept_NK, head_NK))
        constants: list[Tensor] = []
        arguments = (hidden_NH[rows], head, targets_N[rows], temperature, kept, wanted, constants)
        if len(chunks) > 1 and torch.is_grad_enabled():
            logprobs_n, further_nK = checkpoint(_chunk, *arguments, use_reentrant=False)
        else:
            logprobs_n, further_nK = _chunk(*arguments)
        entropy_n, collision_n = constants
        parts.append((logprobs_n, entropy_n, collision_n, further_nK))
    logprobs, entropy, collision, further = zip(*parts, strict=True)
    whole = None if further[0] is None else torch.cat(further)
    return Scores(torch.cat(logprobs), torch.cat(entropy), torch.cat(collision), whole)


def _chunk(
    hidden_NH: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float,
    kept_NK: Tensor | None,
    head_NK: Tensor | None,
    constants: list[Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of a chunk; entropy and collision go into ``constants``, once."""
    logits_NV, targets_N1 = head(hidden_NH).float() / temperature, targets_N[:, None]
    if kept_NK is not None:
        logits_NV = logits_NV.gather(-1, kept_NK.clamp_min(0)).masked_fill(kept_NK < 0, -torch.inf)
        targets_N1 = (kept_NK == targets_N1).int().argmax(dim=-1, keepdim=True)
    logprobs_NV = F.log_softmax(logits_NV, dim=-1)
    if not constants:
        with torch.no_grad():
            p_NV = logprobs_NV.exp()
            constants += [torch.special.entr(p_NV).sum(dim=-1), p_NV.square().sum(dim=-1)]
    if head_NK is None:
        return logprobs_NV.gather(-1, targets_N1)[:, 0], None
    # at once: backward, each gather costs as much as the logits are large
    wanted_N1K = logprobs_NV.gather(-1, torch.cat([targets_N1, head_NK], dim=-1))
    return wanted_N1K[:, 0], wanted_N1K[:, 1:]


def _identity(logits: Tensor) -> Tensor:
    return logits
