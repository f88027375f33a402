"""A reference policy: frozen weights beside those that are trained.

The KL penalty holds the policy near it; distillation learns from it. It computes in the trainer's
precision, unquantized, and is no part of the module: neither optimized nor saved.

B completions, S predictions.
"""

from dataclasses import replace

import torch

from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience
from lightning_qrl.policy import Policy
from lightning_qrl.scoring import Scorer


class Reference:
    """Log-probabilities under a frozen policy.

    Args:
        policy: the reference; its weights are loaded when they are first needed.
        shared_prefix: see `scoring`.
    """

    def __init__(self, policy: Policy, *, shared_prefix: bool = True) -> None:
        self.policy = policy
        self._shared_prefix = shared_prefix
        self._scorer: Scorer | None = None

    def check_tokens(self, policy: Policy) -> None:
        """Raise UserError where a policy reads text as other tokens than the reference."""
        if self.policy.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise UserError(
                f"reference {self.policy.name} has other tokens than policy {policy.name}: "
                "log-probabilities of one say nothing about the other"
            )

    def score(self, experience: Experience, temperature: float, device: torch.device) -> Experience:
        """The experience with the reference's log-probabilities.

        Args:
            experience: a rollout, on any device.
            temperature: divides the reference's logits, as it does the policy's.
            device: where to compute.
        """
        if self._scorer is None:
            model = self.policy.build().eval().requires_grad_(False).to(device)
            self._scorer = Scorer(model, shared_prefix=self._shared_prefix)
        return replace(
            experience, reference_BS=self._scorer.in_parts(experience, temperature, device)
        )
