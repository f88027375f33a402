"""Score centering: no drift toward the sampler, whatever the reward (arXiv 2609.20807).

`lightning_qrl.corrections.centering` has the equations. It is a cure beside importance weights, not
instead of them: with `truncated_importance_sampling` (or `masked_importance_sampling`) on the level
of tokens it centers the weighted score, the paper's SC+TIS; take either line out, and the other is
left. Like these it takes the sampler's ratio out of the loss, whose own is then that to the policy
before the first update. It needs one update on a rollout, except with the loss `reinforce`, and
sampling from the whole distribution.
"""

from typing_extensions import override

from callbacks.base import CorrectionCallback
from lightning_qrl.corrections.centering import Centering
from lightning_qrl.corrections.stack import Corrections


class ScoreCentering(CorrectionCallback):
    """Takes the sampler's expected score out of the gradient.

    Args:
        head: likeliest tokens of the sampler, at each token, whose log-probabilities it tells.

    Raises:
        ValueError: the head is empty.
    """

    single = True

    def __init__(self, head: int = 128) -> None:
        super().__init__()
        self.centering = Centering(head)

    @override
    def correct(self, corrections: Corrections) -> None:
        corrections.add(self.centering, by=self.handle)
