"""SAPO: a sigmoid gate instead of a clip (Soft Adaptive Policy Optimization, arXiv 2511.20347).

    L    = - 1/C sum_i 1/|o_i| sum_t f(rho_it) A_i
    f(x) = 4 / tau sigmoid( tau (x - 1) ),    tau = temperature_pos if A_i > 0, else temperature_neg

At x = 1 the gate's slope is 1, the plain policy gradient; away from it the slope falls off smoothly
on both sides. The higher temperature for A <= 0 makes it fall off faster there. C counts the
completions of the whole optimizer step that have a token in the mask.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_qrl.experience import Experience
from lightning_qrl.losses._reductions import completion_mean
from lightning_qrl.losses.base import Loss, log_ratio, ratio_metrics
from lightning_qrl.metrics import Metric


@dataclass(frozen=True)
class Sapo(Loss):
    """Softly gated policy loss.

    Attributes:
        temperature_pos: of the gate where A > 0.
        temperature_neg: of the gate elsewhere.

    Raises:
        ValueError: a temperature is not above 0 and finite.
    """

    temperature_pos: float = 1.0
    temperature_neg: float = 1.05

    def __post_init__(self) -> None:
        for name in ("temperature_pos", "temperature_neg"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")

    @override
    def per_token(
        self, logprobs_BS: Tensor, experience: Experience
    ) -> tuple[Tensor, dict[str, Metric]]:
        advantages_B1 = experience.advantages_B[:, None]
        temperature_B1 = torch.where(advantages_B1 > 0, self.temperature_pos, self.temperature_neg)
        ratio_BS = log_ratio(logprobs_BS, experience).exp()
        half_BS = torch.sigmoid(temperature_B1 * (ratio_BS - 1))
        slope_BS = ratio_BS * 4 * half_BS * (1 - half_BS)  # what multiplies A grad log pi
        metrics = ratio_metrics(ratio_BS, slope_BS, experience.mask_BS)
        return -4 / temperature_B1 * half_BS * advantages_B1, metrics

    @override
    def reduce(self, values_BS: Tensor, experience: Experience) -> Tensor:
        return completion_mean(values_BS, experience)
