"""Router replay (R3): the trainer of a mixture of experts takes the experts that the sampler took.

Where sampler and trainer differ by a rounding error, their routers send some tokens to different
experts, and the log-probabilities of these tokens are far apart. R3 (Ma et al., arXiv 2510.11370)
records the sampler's choices, of every token of prompt and completion, every layer and every one of
the K experts, and replays them in the trainer; only the choice: the experts' shares are computed
from the trainer's own logits, and the gradient flows through them (see `lightning_qrl.routing`).

    train/router_replay/agreement    share of (token, router) where the trainer's own choice, as a
                                     set, would have been the recorded one

What a step costs more: 5% on `embedded-moe` in FP32, less where layers are quantized.

Replayed is all that is scored for the loss, also before the first update on a rollout; a reference
and held-out evaluation route by themselves. No load-balancing loss is part of RL here, so there is
none that replayed choices could mislead.
"""

from functools import partial

import lightning as L
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from callbacks.base import Named, grpo_module
from lightning_qrl.errors import UserError
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.rollouts.base import recording_routes
from lightning_qrl.routing import Routers


class RouterReplay(Named):
    """Replays the sampler's choice of experts in the trainer."""

    single = True
    replays_routes = True

    def check_policy(self, module: PolicyModule, skeleton: PreTrainedModel) -> None:
        """Raise UserError where the policy has no routers, or some that cannot be replayed."""
        if not isinstance(module, GRPOModule):
            raise UserError("only GRPO has rollouts whose routes could be replayed")
        try:
            Routers(skeleton)
        except ValueError as error:
            message = f"policy {module.policy.name}: {error}; take {self.handle} out"
            raise UserError(message) from None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        module = grpo_module(pl_module, self)
        self.check_policy(module, module.policy.skeleton())
        module.replays_routes = self.replays_routes
        module.around_rollouts["routes"] = partial(recording_routes, module.engine)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        module = grpo_module(pl_module, self)
        assert module.scorer.routers is not None, "setup has asked for them"
        agreement = module.scorer.routers.agreement()
        module.step_metrics.add({"train/router_replay/agreement": agreement})
