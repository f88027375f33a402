"""pass@k: the chance that at least one of k completions solves a prompt.

With c of n completions right, the unbiased estimate (Chen et al., arXiv 2107.03374, equation 1) is

    pass@k = 1 - C(n - c, k) / C(n, k)
"""

from math import comb

import torch
from torch import Tensor


def pass_at_k(solved_P: Tensor, samples: int, k: int) -> Tensor:
    """The estimate of each prompt.

    Args:
        solved_P: int64 [P], completions that solved each prompt.
        samples: completions of each prompt, n.
        k: at most n.

    Returns:
        float64 [P].

    Raises:
        ValueError: k is not between 1 and n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must be between 1 and {samples} samples, got {k}")
    chances = [1 - comb(samples - c, k) / comb(samples, k) for c in solved_P.tolist()]
    return torch.tensor(chances, dtype=torch.float64)
