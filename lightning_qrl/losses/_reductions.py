"""How the values of a step's tokens become one number: the denominators of the losses.

Each function gives a micro-batch's share: the shares of all micro-batches and ranks add up to the
average over the whole optimizer step, so no split of the step changes the gradient. Masked tokens
are in neither numerator nor denominator; over nothing the average is 0.

B completions, S predictions.
"""

from torch import Tensor

from lightning_qrl.experience import Experience


def token_mean(values_BS: Tensor, experience: Experience) -> Tensor:
    """Every token weighs the same: sum / tokens of the step."""
    return _sum(values_BS, experience) / max(experience.step.tokens, 1)


def rank_token_mean(values_BS: Tensor, experience: Experience) -> Tensor:
    """The mean over ranks of sum / tokens of that rank's share of the step."""
    step = experience.step
    return _sum(values_BS, experience) / (max(step.rank_tokens, 1) * step.ranks)


def completion_mean(values_BS: Tensor, experience: Experience) -> Tensor:
    """Every completion weighs the same: the mean over completions of their token means."""
    length_B1 = experience.mask_BS.sum(dim=1, keepdim=True).clamp_min(1)
    return _sum(values_BS / length_B1, experience) / max(experience.step.completions, 1)


def completion_sum(values_BS: Tensor, experience: Experience) -> Tensor:
    """The mean over completions of the sums over their tokens."""
    return _sum(values_BS, experience) / max(experience.step.completions, 1)


def fixed_length_mean(values_BS: Tensor, experience: Experience) -> Tensor:
    """As `completion_sum`, over the length limit: sum / (completions x max_new_tokens)."""
    return completion_sum(values_BS, experience) / experience.max_new_tokens


def _sum(values_BS: Tensor, experience: Experience) -> Tensor:
    return values_BS.masked_fill(~experience.mask_BS, 0.0).sum()
