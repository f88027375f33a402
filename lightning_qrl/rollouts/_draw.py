"""Drawing tokens: one uniform number a completion, and the inverse of the distribution function.

    token = the first v with F(v) > u,    F(v) = p(0) + ... + p(v)

The numbers come from the CPU whatever computes the policy, and one is drawn for every completion at
every step, whether or not it has ended: what one completion draws depends on nothing that happens
to the others. F is summed in float64: in FP32 a tail of tokens below 1e-8 each, 50 000 of them,
would vanish.

N completions, D distributions, V vocabulary.
"""

import torch
from torch import Tensor


def draw(logprobs_DV: Tensor, row_N: Tensor, uniform_N: Tensor) -> Tensor:
    """One token for each completion.

    Args:
        logprobs_DV: float32 [D, V], log-probabilities; minus infinity is never drawn.
        row_N: int64 [N], the distribution of each completion.
        uniform_N: float64 [N] in [0, 1).

    Returns:
        int64 [N].
    """
    if logprobs_DV.device.type == "mps":  # it has no float64
        return draw(logprobs_DV.cpu(), row_N.cpu(), uniform_N.cpu()).to(logprobs_DV.device)
    rows, vocabulary = logprobs_DV.shape
    ends_DV = logprobs_DV.exp().cumsum(dim=-1, dtype=torch.float64)
    ends_DV /= ends_DV[:, -1:].clone()
    # moved up by its number each row ends where the next begins: one sorted sequence to search
    ends_DV += torch.arange(rows, device=ends_DV.device)[:, None]
    next_N = torch.nextafter(row_N + 1.0, row_N.double())
    at_N = torch.minimum(row_N + uniform_N, next_N)  # row + u may round to the next row
    return torch.searchsorted(ends_DV.flatten(), at_N, right=True) - row_N * vocabulary
