"""GRPO: sample groups of completions, judge them, and make the better ones likelier.

One phase of training (Shao et al., arXiv 2402.03300):

1. `collect` samples G completions of each prompt with the current weights, has the task judge
   them, and turns rewards into group-relative advantages: an `Experience`.
2. `training_step` is a pure function of a micro-batch of it: logits, log-probabilities, loss,
   metrics. Lightning does the rest: accumulation, clipping, the optimizer, several devices.
3. With the updated weights the next phase begins. One epoch of Lightning is one phase (`data.py`).

What a step is made of has its own page: `advantages`, `losses`, `overlong`, `kl`, `scoring`.

B completions, S predictions, P prompts, G group.
"""

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_qrl.advantages import AdvantageEstimator
from lightning_qrl.analysis.mismatch import rollout_correction, sampling_mismatch
from lightning_qrl.experience import Experience, make_experience
from lightning_qrl.groups import Groups
from lightning_qrl.kl import KLPenalty
from lightning_qrl.losses.base import Loss
from lightning_qrl.losses.dapo import Dapo
from lightning_qrl.metrics import Metric, Tally, deviation, largest, mean
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.overlong import Overlong
from lightning_qrl.policy import Policy
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.reference import Reference
from lightning_qrl.rollouts.base import RolloutEngine
from lightning_qrl.scoring import Scorer
from lightning_qrl.seeding import derive_seed
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

    Raises:
        ValueError: an argument is out of range, or a reference is missing or without use.
    """

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
        self.loss = loss
        self.advantages = advantages
        self.overlong = overlong
        self.kl = kl
        self.reference = reference
        self.shared_prefix = shared_prefix
        self.on_reward_error = on_reward_error
        self.num_tokens = 0
        self._tally = Tally()
        self._rollout_metrics: dict[str, Metric] = {}
        self._seconds: dict[str, float] = {}
        self._step_began = time.perf_counter()

    @override
    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        if has_dropout(model):
            warnings.warn(
                f"policy {self.policy.name} trains with dropout but samples without it: importance "
                "ratios are then noisy from the first update; set it to 0 in its config.json",
                stacklevel=2,
            )
        self.scorer = Scorer(model, shared_prefix=self.shared_prefix)
        return model

    def collect(
        self, prompts: Sequence[Prompt], phase: int, spares: Iterable[Sequence[Prompt]] = ()
    ) -> Experience:
        """Sample a group for each prompt with the current weights, and judge it.

        Args:
            prompts: this rank's P prompts.
            phase: number of the rollout; with the seed and the rank it decides the samples.
            spares: dynamic sampling (DAPO, Yu et al., arXiv 2503.14476, section 3.2): as long as
                groups are left whose rewards are all equal, as many of the next prompts are sampled
                too, and mixed groups take their places.

        Returns:
            The experience of P x G completions on the CPU, those of one prompt side by side.
        """
        self._step_began = time.perf_counter()
        groups = sampled = self._rollout(prompts, phase)
        for attempt, spare in enumerate(spares, start=1):
            unmixed = int(groups.unmixed_P.sum())
            if not (unmixed and spare):
                break
            more = self._rollout(spare[:unmixed], phase, attempt)
            groups, sampled = (groups + more).mixed_first(len(prompts)), sampled + more
        self._rollout_metrics = self._describe(sampled)
        return self._experience(groups)

    def _rollout(self, prompts: Sequence[Prompt], phase: int, *attempt: int) -> Groups:
        seed = derive_seed(self.seed, "rollout", phase, self.global_rank, *attempt)
        with self._timed("gen"):
            completions = self.sample(prompts, self.group_size, seed)
        with self._timed("reward"):
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
            groups.completions, rewards_PG.flatten(), advantages_B, self.policy.pad_id, limit
        )
        if self.overlong.mask_truncated_completions:
            experience = experience.where(~experience.truncated_B)
        if self.reference is not None:
            with self._timed("ref"), self.trainer.precision_plugin.forward_context():
                temperature, device = self.engine.temperature, self.device
                experience = self.reference.score(experience, temperature, device)
        return experience

    def _describe(self, groups: Groups) -> dict[str, Metric]:
        """Metrics of a rollout; every update on it logs them."""
        metrics = groups.metrics()
        metrics["reward_errors"] = Metric("sum", float(self.reward_errors))
        self.reward_errors = 0
        return metrics

    @override
    def training_step(self, experience: Experience, batch_idx: int) -> Tensor:
        with self.plan.holding():
            logprobs_BS, entropy_BS = self.scorer(experience, self.engine.temperature)
        loss, metrics = self.loss(logprobs_BS, experience)
        mask_BS = experience.mask_BS
        if experience.reference_BS is not None:
            kl_BS = self.kl.per_token(logprobs_BS, experience.reference_BS, mask_BS)
            metrics["kl"] = mean(kl_BS.detach(), mask_BS)
            if self.kl.kl_coef:
                loss = loss + self.kl.kl_coef * self.loss.reduce(kl_BS, experience)
        age_BS = self.global_step - experience.versions_BS
        self._tally.add(_prefixed("train/", metrics))
        self._tally.add(_prefixed("train/", sampling_mismatch(logprobs_BS, experience)))
        self._tally.add(_prefixed("rollout_corr/", rollout_correction(logprobs_BS, experience)))
        self._tally.add(
            {
                "train/entropy": mean(entropy_BS, mask_BS),
                "async/staleness_mean": mean(age_BS, mask_BS),
                "async/staleness_max": largest(age_BS[mask_BS]),
                "train/num_completions": Metric("sum", float(mask_BS.any(dim=1).sum())),
                "num_tokens": Metric("sum", float(mask_BS.sum())),
                "train/loss": Metric("sum", float(loss.detach())),
            }
        )
        return loss * experience.step.scale

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._tally.add(_prefixed("train/", self._rollout_metrics))
        values = self._tally.flush()
        tokens = values.pop("num_tokens")
        self.num_tokens += int(tokens)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        times, self._seconds = self._seconds, {}
        most_entropy = math.log(self.scorer.vocabulary)
        within, spread = (values.get(f"train/reward_{n}", 0.0) for n in ("variance_within", "std"))
        values |= {
            "train/grad_norm": float(torch.nn.utils.get_total_norm(grads)),
            "train/learning_rate": optimizer.param_groups[0]["lr"],
            "train/num_tokens": self.num_tokens,
            "train/relative_entropy": values["train/entropy"] / most_entropy,
            "train/residual_variance": within / spread**2 if spread else 0.0,
            "train/step_time": seconds,
            "train/tokens_per_second": tokens / seconds,
            "async/weight_version": self.global_step,
            "quant/num_layers_quantized": self.plan.count_quantized(),
            "quant/num_layers_bf16": self.plan.count_kept(),
            "timing_s/update_actor": seconds - sum(times.values()),
        }
        values |= {f"timing_s/{part}": taken for part, taken in times.items()}
        self._record({name: float(value) for name, value in values.items()})

    def _record(self, values: dict[str, float]) -> None:
        """Give the metrics of an optimizer step to the loggers and to the callbacks.

        Lightning's own `log_dict` takes half a millisecond for each of them.
        """
        step = self.global_step + 1
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=step)
        named = values | {"step": step}
        self.trainer.callback_metrics.update({n: torch.tensor(v) for n, v in named.items()})

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["lightning_qrl"]["num_tokens"] = self.num_tokens

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.num_tokens = checkpoint.get("lightning_qrl", {}).get("num_tokens", 0)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began


def check_reference(loss: Loss, kl: KLPenalty, reference: Reference | None) -> None:
    """Raise ValueError where a reference is missing, or is given and does nothing."""
    needed = loss.needs_reference or kl.kl_coef > 0
    if needed and reference is None:
        why = f"loss {type(loss).__name__.lower()}" if loss.needs_reference else "kl_coef"
        raise ValueError(f"{why} needs a reference policy; set grpo.reference")
    if reference is not None and not needed:
        raise ValueError("reference does nothing: set kl_coef, or loss=distill, or take it out")


def has_dropout(model: nn.Module) -> bool:
    """Whether any layer of a model drops activations or attention weights in training."""
    rates = (m.p if isinstance(m, nn.Dropout) else _attention_dropout(m) for m in model.modules())
    return any(rate > 0 for rate in rates)


def _attention_dropout(module: nn.Module) -> float:
    rate = getattr(module, "attention_dropout", 0.0)
    return rate if isinstance(rate, float) else 0.0


def _prefixed(prefix: str, metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {f"{prefix}{name}": metric for name, metric in metrics.items()}
