"""What an optimizer step minimizes: the policy loss, corrected, and the KL penalty.

    L = reduce( corrections( loss_t ) ) + kl_coef reduce( KL_t )

`losses` says what loss_t and reduce are, `corrections` what is done where the sampler was another
policy than the trainer's, `kl` what holds the policy near a reference.

B completions, S predictions.
"""

from dataclasses import dataclass, field

from torch import Tensor

from lightning_qrl.corrections.stack import Corrections
from lightning_qrl.experience import Experience
from lightning_qrl.kl import KLPenalty
from lightning_qrl.logprobs import Scores
from lightning_qrl.losses.base import Loss
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.metrics import Metric, mean
from lightning_qrl.reference import Reference


@dataclass(frozen=True)
class Objective:
    """A pure function of what the policy makes of a batch.

    Attributes:
        loss: the policy loss.
        kl: the penalty on the divergence from the reference.
        corrections: callbacks add to them.
    """

    loss: Loss = Dapo()
    kl: KLPenalty = KLPenalty()
    corrections: Corrections = field(default_factory=Corrections)

    def __call__(self, scores: Scores, experience: Experience) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's share of the step's loss, and metrics by their full names."""
        experience = self.corrections.anchored(self.loss, scores, experience)
        experience = self.corrections.rebased(scores, experience)
        values_BS, metrics = self.loss.per_token(scores.logprobs, experience)
        values_BS, corrected = self.corrections(values_BS, scores, experience)
        loss = self.loss.reduce(values_BS, experience)
        if experience.reference_BS is not None:
            mask_BS = experience.mask_BS
            kl_BS = self.kl.per_token(scores.logprobs, experience.reference_BS, mask_BS)
            metrics["kl"] = mean(kl_BS.detach(), mask_BS)
            if self.kl.kl_coef:
                loss = loss + self.kl.kl_coef * self.loss.reduce(kl_BS, experience)
        metrics["loss"] = Metric("sum", float(loss.detach()))
        return loss, prefixed("train/", metrics) | prefixed("rollout_corr/", corrected)


def prefixed(prefix: str, metrics: dict[str, Metric]) -> dict[str, Metric]:
    """The metrics under a folder."""
    return {f"{prefix}{name}": metric for name, metric in metrics.items()}


def check_reference(loss: Loss, kl: KLPenalty, reference: Reference | None) -> None:
    """Raise ValueError where a reference is missing, or is given and does nothing."""
    needed = loss.needs_reference or kl.kl_coef > 0
    if needed and reference is None:
        why = f"loss {type(loss).__name__.lower()}" if loss.needs_reference else "kl_coef"
        raise ValueError(f"{why} needs a reference policy; set grpo.reference")
    if reference is not None and not needed:
        raise ValueError("reference does nothing: set kl_coef, or loss=distill, or take it out")
