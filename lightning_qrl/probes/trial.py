"""A trial: GRPO as a run does it, in a probe's world, with a witness of what it does.

The witness writes down what passes between the parts: the prompts that the sampler is given and the
tokens that it returns, and the weights and the gradient of each update.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_qrl.data import RolloutData
from lightning_qrl.experience import Completion
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.probes.policies import EOS, VOCABULARY, Kind, ProbePolicy
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.tasks.base import Prompt, Split

Weights = dict[str, Tensor]
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class World:
    """What is asked and what earns; a task, and how GRPO is to train on it.

    Attributes:
        observations: the prompts.
        pays: reward of a completion of a prompt.
        policy: which policy (see `policies`).
        tokens: length limit of a completion.
        copies: how often each prompt is in a rollout.
        group_size: completions of each.
        iterations: updates on each rollout.
        updates: in all.
        micro_batches: parts that each update's gradient is accumulated from.
        temperature: of the sampler.
        optimizer: the optimizer's settings.
    """

    observations: tuple[str, ...]
    pays: Callable[[str, str], float]
    policy: Kind = "qwen3"
    tokens: int = 1
    copies: int = 2
    group_size: int = 32
    iterations: int = 1
    updates: int = 30
    micro_batches: int = 1
    temperature: float = 1.0
    optimizer: AdamWSettings = AdamWSettings(lr=1e-2)

    def prompts(self, split: Split) -> list[Prompt]:
        """Those of one rollout."""
        return [Prompt(text) for text in self.observations for _ in range(self.copies)]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """What the world pays."""
        return self.pays(prompt.text, completion)

    def solved(self, reward: float) -> bool:
        """A world pays 1 for the best."""
        return reward == 1.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """What the sampler was asked and what it said.

    Attributes:
        prompts: token ids of each prompt, once for each of its completions.
        said: token ids of the completions.
        logprobs_N: float32, what the sampler says of each token of each completion.
        rewards: what the world pays for them.
        group_size: completions of each prompt, side by side.
    """

    prompts: list[Tokens]
    said: list[Tokens]
    logprobs_N: list[Tensor]
    rewards: list[float]
    group_size: int


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step.

    Attributes:
        weights: before it.
        gradient: that it takes.
    """

    weights: Weights
    gradient: Weights


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Attributes:
        world: it was in.
        policy: the policy; builds the model as it was at first.
        rollouts: all of them.
        updates: all of them.
        weights: afterwards.
        metrics: of the last step, by name.
    """

    world: World
    policy: ProbePolicy
    rollouts: list[Rollout]
    updates: list[Update]
    weights: Weights
    metrics: dict[str, float]


def attempt(world: World) -> Trial:
    """Train a policy in a world, on the accelerator that a run would take."""
    policy = ProbePolicy(world.policy)
    engine = Witness(
        eos_id=policy.eos_id,
        pad_id=policy.pad_id,
        max_new_tokens=world.tokens,
        temperature=world.temperature,
    )
    module = GRPOModule(
        policy=policy,
        task=world,
        engine=engine,
        optimizer=world.optimizer,
        group_size=world.group_size,
    )
    prompts = world.prompts("train")
    data = RolloutData(
        prompts,
        group_size=world.group_size,
        prompts_per_rollout=len(prompts),
        num_iterations=world.iterations,
        micro_batches=world.micro_batches,
    )
    witness = UpdateWitness()
    trainer = _trainer(world, witness)
    trainer.fit(module, data)
    weights = _copy(module.model.state_dict())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Trial(world, policy, engine.rollouts(world), witness.seen, weights, metrics)


def _trainer(world: World, witness: L.Callback) -> L.Trainer:
    return L.Trainer(
        max_steps=world.updates,
        accumulate_grad_batches=world.micro_batches,
        devices=1,
        plugins=[LightningEnvironment()],  # alone, whatever cluster this machine belongs to
        callbacks=[witness],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=1,
    )


class Witness(Embedded):
    """The embedded engine; it keeps what it was asked and what it said."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[tuple[list[Tokens], list[Completion]]] = []

    @override
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        seed: int,
        limits: Sequence[int] | None = None,
    ) -> list[Completion]:
        completions = super().generate(prompts, samples=samples, seed=seed, limits=limits)
        asked = [tuple(prompt) for prompt in prompts for _ in range(samples)]
        self.seen.append((asked, completions))
        return completions

    def rollouts(self, world: World) -> list[Rollout]:
        """All rollouts, and what the world pays for them."""
        return [_rollout(world, prompts, completions) for prompts, completions in self.seen]


def _rollout(world: World, prompts: list[Tokens], completions: list[Completion]) -> Rollout:
    said = [tuple(completion.token_ids_N.tolist()) for completion in completions]
    logprobs_N = [completion.logprobs_N for completion in completions]
    pairs = zip(prompts, said, strict=True)
    rewards = [world.pays(text(prompt), text(answer)) for prompt, answer in pairs]
    return Rollout(prompts, said, logprobs_N, rewards, world.group_size)


def text(token_ids: Tokens) -> str:
    """What token ids spell, without a closing end of sequence."""
    return "".join(VOCABULARY[i] for i in token_ids).removesuffix(EOS)


class UpdateWitness(L.Callback):
    """Keeps the weights and the gradient of each update."""

    def __init__(self) -> None:
        self.seen: list[Update] = []

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        model = pl_module.model
        assert isinstance(model, nn.Module)
        gradient = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        self.seen.append(Update(_copy(model.state_dict()), _copy(gradient)))


def _copy(tensors: Weights) -> Weights:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
