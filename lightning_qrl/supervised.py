"""Supervised warm start: teach a policy a task's answers, then blunt it.

Reinforcement learning sharpens an ability that is already there. To get a policy that has the
ability but not the habit, like a pretrained base model, it is first trained on right answers and
then, for the last `blunt_steps`, on noisy ones: each character of an answer is replaced by a random
one of the task's answers with probability `noise`.

Loss: mean cross-entropy of the answer's tokens and the end-of-sequence token over the batch. A
mixture of experts adds `router_aux_loss_coef` (of its configuration) times a balancing loss, or
some experts end up without a token. It is the Switch Transformer's (arXiv 2101.03961, equation 4),
a decoder layer at a time; transformers' own is taken over all layers at once, where one layer's
idle expert is made up for by another layer's busy one.

B demonstrations, S predictions, N = B S, E experts, K experts a token.
"""

import random
from collections.abc import Sequence
from typing import cast

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_qrl.errors import UserError
from lightning_qrl.experience import Completion, Experience, make_experience, split_for_updates
from lightning_qrl.logprobs import token_logprobs
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.rollouts.base import RolloutEngine
from lightning_qrl.seeding import derive_seed
from lightning_qrl.tasks.base import Prompt, Task

LARGEST_BATCH = 2**24  # demonstrations; each takes a kilobyte and more
STEPS_PER_EPOCH = 50  # data is drawn, and a checkpoint can be taken, once per epoch


class SupervisedModule(PolicyModule):
    """Trains a policy on demonstrations.

    Args:
        policy: the policy.
        task: judges completions in evaluations.
        engine: samples completions in evaluations.
        optimizer: the optimizer's settings.
        seed: decides every draw.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        task: Task,
        engine: RolloutEngine,
        optimizer: AdamWSettings,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, task, engine, optimizer, seed)

    @override
    def training_step(self, batch: Experience, batch_idx: int) -> Tensor:
        loss, logged = self.loss_of(batch)
        self.log_dict({**logged, "step": float(self.global_step + 1)})
        return loss

    @override
    def loss_of(self, batch: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        inputs_BS, targets_BS = batch.input_ids_BT[:, :-1], batch.input_ids_BT[:, 1:]
        weight = getattr(self.model.config, "router_aux_loss_coef", 0.0)
        routed = {"output_router_logits": True} if weight else {}
        output = self.model(input_ids=inputs_BS, use_cache=False, **routed)
        logprobs_BS, _ = token_logprobs(output.logits, targets_BS)
        loss = -logprobs_BS.masked_fill(~batch.mask_BS, 0.0).sum() / batch.step.tokens
        logged = {"train/loss": loss.detach()}
        if weight:
            read_N = inputs_BS.flatten() != self.policy.pad_id
            chosen = self.model.config.num_experts_per_tok
            each = [imbalance(logits_NE[read_N], chosen) for logits_NE in output.router_logits]
            balance = torch.stack(each).mean()
            logged["train/router_imbalance"] = balance.detach()
            loss = loss + weight * balance
        return loss * batch.step.scale, logged

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("train/grad_norm", self.grad_norm)
        self.log("train/learning_rate", optimizer.param_groups[0]["lr"])


def imbalance(logits_NE: Tensor, chosen: int) -> Tensor:
    """How unevenly one router spreads tokens: 1 when evenly, E / K when all go to the same K.

    Args:
        logits_NE: the router's, of N tokens.
        chosen: K, experts a token.

    Returns:
        E sum_e f_e p_e: the share f of the choices that expert e got, and its mean probability p,
        through which the gradient flows.
    """
    experts = logits_NE.shape[-1]
    probability_NE = logits_NE.float().softmax(dim=-1)
    choices = probability_NE.topk(chosen, dim=-1).indices.flatten()
    share_E = torch.bincount(choices, minlength=experts) / choices.numel()
    return experts * (share_E * probability_NE.mean(dim=0)).sum()


class Demonstrations(L.LightningDataModule):
    """Batches of prompts with their answers.

    Args:
        policy: encodes them.
        prompts: the training split.
        batch_size: demonstrations of a step.
        max_steps: optimizer steps of the run.
        blunt_steps: how many of these, at the end, see noisy answers.
        noise: probability that a character of a noisy answer is replaced.
        seed: decides every draw.

    Raises:
        ValueError: an argument is out of range, or a prompt has no answer.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        *,
        max_steps: int,
        batch_size: int = 256,
        blunt_steps: int = 0,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= batch_size <= LARGEST_BATCH:
            raise ValueError(f"batch_size must be 1 to {LARGEST_BATCH}, got {batch_size}")
        if not 0 <= noise <= 1:
            raise ValueError(f"noise must be 0 to 1, got {noise}")
        if blunt_steps < 0:
            raise ValueError(f"blunt_steps must be at least 0, got {blunt_steps}")
        if not all(prompt.answer for prompt in prompts):
            raise ValueError("the task has prompts without an answer to demonstrate")
        self.policy = policy
        self.prompts = prompts
        self.batch_size = batch_size
        self.blunt_from = max_steps - blunt_steps
        self.noise = noise
        self.seed = seed
        self.alphabet = sorted({character for prompt in prompts for character in prompt.answer})

    @override
    def train_dataloader(self) -> DataLoader[Experience]:
        assert self.trainer is not None
        first = self.trainer.global_step
        parts = self.trainer.accumulate_grad_batches
        if self.batch_size % parts:
            raise UserError(
                f"supervised.batch_size={self.batch_size} does not divide into "
                f"accumulate_grad_batches={parts} equal parts"
            )
        batches = [
            batch
            for step in range(first, first + STEPS_PER_EPOCH)
            for batch in split_for_updates(self.batch(step), [torch.arange(self.batch_size)], parts)
        ]
        return DataLoader(cast("torch.utils.data.Dataset[Experience]", batches), batch_size=None)

    def batch(self, step: int) -> Experience:
        """The demonstrations of one step; noisy ones in the last `blunt_steps`."""
        draw = random.Random(derive_seed(self.seed, "demonstrations", step))
        noise = self.noise if step >= self.blunt_from else 0.0
        chosen = draw.choices(self.prompts, k=self.batch_size)
        shown = [self._demonstrate(prompt, noise, draw) for prompt in chosen]
        zeros_B = torch.zeros(len(shown))
        return make_experience(shown, zeros_B, zeros_B, self.policy.pad_id)

    def _demonstrate(self, prompt: Prompt, noise: float, draw: random.Random) -> Completion:
        answer = "".join(
            draw.choice(self.alphabet) if draw.random() < noise else character
            for character in prompt.answer
        )
        ids = torch.tensor([*self.policy.encode(answer, begins=False), self.policy.eos_id])
        return Completion(
            prompt_ids=tuple(self.policy.encode(prompt.text)),
            token_ids_N=ids,
            logprobs_N=torch.zeros(len(ids)),
            versions_N=torch.zeros_like(ids),
            truncated=False,
        )
