"""Group-relative advantages: pure functions of the rewards of each prompt's group.

GRPO (Shao et al., arXiv 2402.03300, section 4.1): with G completions of one prompt,

    A_i = (r_i - mean(r)) / (std(r) + 1e-4),    std with ddof = 1.

A group whose rewards are all equal says nothing about which completion is better: its advantages
are exactly 0 (not rounding noise divided by 1e-4), and callers count such groups.

P prompts, G completions of each.
"""

from torch import Tensor

STD_EPSILON = 1e-4  # as TRL


def group_normalized(rewards_PG: Tensor) -> Tensor:
    """Advantages normalized within each group.

    Args:
        rewards_PG: float [P, G], G at least 2.

    Returns:
        Advantages, the shape and dtype of ``rewards_PG``; exactly 0 in groups of equal rewards.
    """
    centered = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    normalized = centered / (rewards_PG.std(dim=1, keepdim=True) + STD_EPSILON)
    return normalized.masked_fill(zero_variance(rewards_PG)[:, None], 0.0)


def zero_variance(rewards_PG: Tensor) -> Tensor:
    """Bool [P]: groups whose rewards are all equal, so that they carry no signal."""
    return (rewards_PG == rewards_PG[:, :1]).all(dim=1)
