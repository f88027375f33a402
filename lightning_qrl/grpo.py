"""GRPO: sample groups of completions, judge them, and make the better ones likelier.

One phase of training (Shao et al., arXiv 2402.03300):

1. `collect` samples G completions of each prompt with the current weights, has the task judge
   them, and turns rewards into group-relative advantages: an `Experience`.
2. `training_step` is a pure function of a micro-batch of it: logits, log-probabilities, loss,
   metrics. Lightning does the rest: accumulation, clipping, the optimizer, several devices.
3. With the updated weights the next phase begins. One epoch of Lightning is one phase (`data.py`).

What a step is made of has its own page: `advantages`, `overlong`, `scoring`, `objective` with
`losses`, `corrections` and `kl`.

B completions, S predictions, P prompts, G group.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_qrl.advantages import AdvantageEstimator
from lightning_qrl.analysis.batch import batch_metrics
from lightning_qrl.asynchrony.pipeline import Pipeline, flow_metrics
from lightning_qrl.experience import Experience, make_experience
from lightning_qrl.groups import Groups
from lightning_qrl.kl import KLPenalty
from lightning_qrl.losses.base import Loss
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.metrics import Metric, deviation
from lightning_qrl.objective import Objective, check_reference, prefixed
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.overlong import Overlong
from lightning_qrl.policy import Policy, has_dropout
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.reference import Reference
from lightning_qrl.regime import Regime
from lightning_qrl.rollouts.base import RolloutEngine, telling
from lightning_qrl.scoring import Scorer
from lightning_qrl.seeding import derive_seed
from lightning_qrl.step_metrics import StepMetrics
from lightning_qrl.tasks.base import Prompt, Task


class GRPOModule(PolicyModule):
    """Trains a policy with group-relative policy optimization.

    Args:
        policy: the policy.
        task: judges completions.
        engine: samples completions.
        optimizer: the optimizer's settings.
        group_size: completions of each prompt, G; at least 2.
        loss: the policy loss.
        advantages: turns a group's rewards into advantages.
        overlong: what is done about completions at the length limit.
        kl: the penalty on the divergence from the reference.
        reference: the policy that ``kl`` and ``loss`` compare with.
        shared_prefix: compute each distinct prompt of a micro-batch once (see `scoring`).
        on_reward_error: where the task raises, ``stop`` the run, or ``skip`` that reward.
        seed: decides every draw of the sampler.

    Attributes:
        regime: how the data makes updates of rollouts.
        replays_routes: routers choose as the sampler's did (see `routing`); a callback decides.

    Raises:
        ValueError: an argument is out of range, or a reference is missing or without use.
    """

    replays_routes = False

    def __init__(
        self,
        *,
        policy: Policy,
        task: Task,
        engine: RolloutEngine,
        optimizer: AdamWSettings,
        group_size: int = 16,
        loss: Loss = Dapo(),
        advantages: AdvantageEstimator = AdvantageEstimator(),
        overlong: Overlong = Overlong(),
        kl: KLPenalty = KLPenalty(),
        reference: Reference | None = None,
        shared_prefix: bool = True,
        on_reward_error: Literal["stop", "skip"] = "stop",
        seed: int = 0,
    ) -> None:
        if group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {group_size}: "
                "a completion is judged against the others of its group"
            )
        if on_reward_error not in ("stop", "skip"):
            raise ValueError(f"on_reward_error must be stop or skip, got {on_reward_error!r}")
        check_reference(loss, kl, reference)
        if overlong.overlong_buffer > engine.max_new_tokens:
            raise ValueError(
                f"overlong_buffer={overlong.overlong_buffer} is longer than "
                f"rollout.max_new_tokens={engine.max_new_tokens}"
            )
        super().__init__(policy, task, engine, optimizer, seed)
        self.group_size = group_size
        self.objective = Objective(loss, kl)
        self.advantages = advantages
        self.overlong = overlong
        self.reference = reference
        self.shared_prefix = shared_prefix
        self.on_reward_error = on_reward_error
        self.step_metrics = StepMetrics()
        self.regime = Regime()

    @property
    def loss(self) -> Loss:
        """The policy loss."""
        return self.objective.loss

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "regime"):
            self.regime = data.regime(self.trainer.world_size)
        corrections = self.objective.corrections
        corrections.check(self.loss, self.regime.updates, self.regime.whole_groups)
        corrections.check_engine(self.engine)
        self.around_rollouts["head"] = partial(telling, self.engine, corrections.head)

    @override
    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        if has_dropout(model):
            warnings.warn(
                f"policy {self.policy.name} trains with dropout but samples without it: importance "
                "ratios are then noisy from the first update; set it to 0 in its config.json",
                stacklevel=2,
            )
        replay = self.replays_routes
        self.scorer = Scorer(model, shared_prefix=self.shared_prefix, replay=replay)
        return model

    def collect(
        self,
        prompts: Sequence[Prompt],
        phase: int,
        spares: Iterable[Sequence[Prompt]] = (),
        pipeline: Pipeline | None = None,
    ) -> Experience:
        """Sample a group for each prompt with the current weights, and judge it.

        Args:
            prompts: this rank's P prompts.
            phase: number of the rollout; with the seed and the rank it decides the samples.
            spares: dynamic sampling (DAPO, Yu et al., arXiv 2503.14476, section 3.2): as long as
                groups are left whose rewards are all equal, as many of the next prompts are sampled
                too, and mixed groups take their places.
            pipeline: with it, the current weights sample what it says, for this phase and later
                ones, and the prompts' groups are those that have been sampled for this one.

        Returns:
            The experience of P x G completions on the CPU, those of one prompt side by side.
        """
        self.step_metrics.begin()
        groups = sampled = self._rollout(prompts, phase, pipeline=pipeline)
        for attempt, spare in enumerate(spares, start=1):
            unmixed = int(groups.unmixed_P.sum())
            if not (unmixed and spare):
                break
            more = self._rollout(spare[:unmixed], phase, attempt)
            groups, sampled = (groups + more).mixed_first(len(prompts)), sampled + more
        flow = flow_metrics() if pipeline is None else pipeline.metrics(phase)
        self.step_metrics.rollout = self._describe(sampled) | flow
        return self._experience(groups)

    def _rollout(
        self,
        prompts: Sequence[Prompt],
        phase: int,
        *attempt: int,
        pipeline: Pipeline | None = None,
    ) -> Groups:
        seed = derive_seed(self.seed, "rollout", phase, self.global_rank, *attempt)
        with self.step_metrics.timed("gen"), self.rolling_out():
            if pipeline is None:
                completions = self.sample(prompts, self.group_size, seed)
            else:
                completions = pipeline.step(phase, self.sample, seed)
        with self.step_metrics.timed("reward"):
            rewards_B = self.judge(prompts, completions, "train")
        groups = Groups(tuple(completions), rewards_B.view(len(prompts), self.group_size))
        if not self.overlong.overlong_buffer:
            return groups
        penalties_PG = self.overlong.penalties(groups.lengths(), self.engine.max_new_tokens)
        return replace(groups, penalties_PG=penalties_PG)

    def _experience(self, groups: Groups) -> Experience:
        """Advantages, layout, and what does not count."""
        limit, rewards_PG = self.engine.max_new_tokens, groups.shaped_PG
        spread = None
        if self.advantages.scale_rewards == "batch":
            spread = deviation(rewards_PG, rewards_PG.isfinite()).over_ranks().value()
        advantages_B = self.advantages(rewards_PG, spread).flatten()
        experience = make_experience(
            groups.completions,
            rewards_PG.flatten(),
            advantages_B,
            self.policy.pad_id,
            limit,
            self.group_size,
        )
        if self.overlong.mask_truncated_completions:
            experience = experience.where(~experience.truncated_B)
        if self.reference is not None:
            with self.step_metrics.timed("ref"), self.trainer.precision_plugin.forward_context():
                temperature, device = self.engine.temperature, self.device
                experience = self.reference.score(experience, temperature, device)
        return experience

    def anchored(self, experience: Experience, parts: Sequence[Tensor]) -> Experience:
        """The rollout with the trainer's own log-probabilities, where a correction needs them.

        Args:
            experience: a rollout, before its first update.
            parts: indices of the micro-batches of the first pass over it. They are scored as they
                will be trained on: one scale for a tensor makes numbers depend on the batch.
        """
        if not self.objective.corrections.wants_proximal(self.loss, self.regime.updates):
            return experience
        with (
            self.step_metrics.timed("old_log_prob"),
            self.trainer.precision_plugin.forward_context(),
            self.plan.holding(),
        ):
            temperature, device = self.engine.temperature, self.device
            proximal_BS = self.scorer.in_parts(experience, temperature, device, parts)
        return replace(experience, proximal_BS=proximal_BS)

    def _describe(self, groups: Groups) -> dict[str, Metric]:
        """Metrics of a rollout; every update on it logs them."""
        metrics = groups.metrics()
        metrics["reward_errors"] = Metric("sum", float(self.reward_errors))
        self.reward_errors = 0
        return prefixed("train/", metrics)

    @override
    def training_step(self, experience: Experience, batch_idx: int) -> Tensor:
        loss, metrics = self.loss_of(experience)
        self.step_metrics.add(metrics)
        return loss

    @override
    def loss_of(self, experience: Experience) -> tuple[Tensor, dict[str, Metric]]:
        with self.plan.holding():
            scores = self.scorer(experience, self.engine.temperature)
        loss, metrics = self.objective(scores, experience)
        measured = batch_metrics(scores, experience, self.global_step, self.regime.largest_lag)
        return loss * experience.step.scale, metrics | measured

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        values = self.step_metrics.finish()
        values |= {
            "train/grad_norm": self.grad_norm,
            "train/learning_rate": optimizer.param_groups[0]["lr"],
            "train/relative_entropy": values["train/entropy"] / math.log(self.scorer.vocabulary),
            "async/weight_version": self.global_step,
            "quant/num_layers_quantized": self.plan.count_quantized(),
            "quant/num_layers_bf16": self.plan.count_kept(),
        }
        self._record({name: float(value) for name, value in values.items()})

    def _record(self, values: dict[str, float]) -> None:
        """Give a step's metrics to loggers and callbacks; `log_dict` takes 0.5 ms for each."""
        step = self.global_step + 1
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=step)
        named = values | {"step": step}
        self.trainer.callback_metrics.update({n: torch.tensor(v) for n, v in named.items()})

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["lightning_qrl"]["num_tokens"] = self.step_metrics.num_tokens

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.step_metrics.num_tokens = checkpoint.get("lightning_qrl", {}).get("num_tokens", 0)
