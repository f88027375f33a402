"""GRPO: sample groups of completions, judge them, and make the better ones likelier.

One phase of training (Shao et al., arXiv 2402.03300):

1. `collect` samples G completions of each prompt with the current weights, has the task judge
   them, and turns rewards into group-relative advantages: an `Experience`.
2. `training_step` is a pure function of a micro-batch of it: logits, log-probabilities, loss,
   metrics. Lightning does the rest: accumulation, clipping, the optimizer, several devices.
3. With the updated weights the next phase begins. One epoch of Lightning is one phase (`data.py`).

There is no KL term and no reference policy.

B completions, T tokens of prompt and completion, S = T - 1 predictions, P prompts, G group,
V vocabulary.
"""

import time
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_qrl.advantages import group_normalized, zero_variance
from lightning_qrl.analysis.mismatch import rollout_correction, sampling_mismatch
from lightning_qrl.experience import Experience, make_experience
from lightning_qrl.logprobs import token_logprobs
from lightning_qrl.losses.base import Loss
from lightning_qrl.metrics import Metric, Tally, largest, mean, smallest
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.plugins import load_plugin
from lightning_qrl.policy import Policy
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.rollouts.base import RolloutEngine
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
        loss: name of a loss in `lightning_qrl.losses`.
        clip_low: the importance ratio is clipped below 1 - clip_low.
        clip_high: the importance ratio is clipped above 1 + clip_high.
        seed: decides every draw of the sampler.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        task: Task,
        engine: RolloutEngine,
        optimizer: AdamWSettings,
        group_size: int = 16,
        loss: str = "dapo",
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        seed: int = 0,
    ) -> None:
        if group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {group_size}: "
                "a completion is judged against the others of its group"
            )
        if not (0 <= clip_low < 1 and clip_high >= 0):
            raise ValueError(
                "clip_low must be in [0, 1) and clip_high at least 0, "
                f"got {clip_low} and {clip_high}"
            )
        super().__init__(policy, task, engine, optimizer, seed)
        self.group_size = group_size
        self.loss: Loss = load_plugin("lightning_qrl.losses", loss)
        self.clip_low = clip_low
        self.clip_high = clip_high
        self._tally = Tally()
        self._rollout_metrics: dict[str, Metric] = {}
        self._step_began = time.perf_counter()

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if has_dropout(self.model):
            warnings.warn(
                f"policy {self.policy.name} trains with dropout but samples without it: importance "
                "ratios are then noisy from the first update; set it to 0 in its config.json",
                stacklevel=2,
            )

    def collect(self, prompts: Sequence[Prompt], phase: int) -> Experience:
        """Sample a group for each prompt with the current weights, and judge it.

        Args:
            prompts: this rank's P prompts.
            phase: number of the rollout; with the seed and the rank it decides the samples.

        Returns:
            The experience of P x G completions on the CPU, those of one prompt side by side.
        """
        self._step_began = time.perf_counter()
        seed = derive_seed(self.seed, "rollout", phase, self.global_rank)
        completions = self.sample(prompts, self.group_size, seed)
        rewards_B = self.judge(prompts, completions, "train")
        rewards_PG = rewards_B.view(len(prompts), self.group_size)
        advantages_B = group_normalized(rewards_PG).flatten()
        experience = make_experience(completions, rewards_B, advantages_B, self.policy.pad_id)
        self._rollout_metrics = rollout_metrics(experience, rewards_PG)
        return experience

    @override
    def training_step(self, experience: Experience, batch_idx: int) -> Tensor:
        logprobs_BS, entropy_BS = self.logprobs(experience)
        loss, metrics = self.loss(
            logprobs_BS, experience, clip_low=self.clip_low, clip_high=self.clip_high
        )
        age_BS = self.global_step - experience.versions_BS
        self._tally.add(_prefixed("train/", metrics))
        self._tally.add(_prefixed("train/", sampling_mismatch(logprobs_BS, experience)))
        self._tally.add(_prefixed("rollout_corr/", rollout_correction(logprobs_BS, experience)))
        self._tally.add(
            {
                "train/entropy": mean(entropy_BS, experience.mask_BS),
                "async/staleness_mean": mean(age_BS, experience.mask_BS),
                "async/staleness_max": largest(age_BS[experience.mask_BS]),
                "num_tokens": Metric("sum", float(experience.mask_BS.sum())),
                "train/loss": Metric("sum", float(loss.detach())),
            }
        )
        return loss * experience.loss_scale

    def logprobs(self, experience: Experience) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities of a batch, with gradient, and its entropy; [B, S] each.

        Right padding needs no attention mask: a causal policy never looks ahead.
        """
        inputs_BS, targets_BS = experience.input_ids_BT[:, :-1], experience.input_ids_BT[:, 1:]
        logits_BSV = self.model(input_ids=inputs_BS, use_cache=False).logits
        return token_logprobs(logits_BSV, targets_BS, self.engine.temperature)

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._tally.add(_prefixed("train/", self._rollout_metrics))
        values = self._tally.flush()
        tokens = values.pop("num_tokens")
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        values |= {
            "train/grad_norm": float(torch.nn.utils.get_total_norm(grads)),
            "train/learning_rate": optimizer.param_groups[0]["lr"],
            "train/step_time": seconds,
            "train/tokens_per_second": tokens / seconds,
            "async/weight_version": self.global_step,
            "quant/num_layers_quantized": self.plan.count_quantized(),
            "quant/num_layers_bf16": self.plan.count_kept(),
            "step": self.global_step + 1,  # Lightning takes this as the step of the whole record
        }
        self.log_dict({name: float(value) for name, value in values.items()})


def has_dropout(model: nn.Module) -> bool:
    """Whether any layer of a model drops activations or attention weights in training."""
    rates = (m.p if isinstance(m, nn.Dropout) else _attention_dropout(m) for m in model.modules())
    return any(rate > 0 for rate in rates)


def _attention_dropout(module: nn.Module) -> float:
    rate = getattr(module, "attention_dropout", 0.0)
    return rate if isinstance(rate, float) else 0.0


def rollout_metrics(experience: Experience, rewards_PG: Tensor) -> dict[str, Metric]:
    """What the completions of a rollout were like; TRL's names, without ``train/``.

    Args:
        experience: the rollout.
        rewards_PG: float32 [P, G], its rewards by group.
    """
    length_B = experience.mask_BS.sum(dim=1)
    ended_B = ~experience.truncated_B
    all_B = torch.ones_like(experience.truncated_B)
    return {
        "reward": mean(experience.rewards_B, all_B),
        "reward_std": Metric("mean", float(experience.rewards_B.std()) * len(all_B), len(all_B)),
        "frac_reward_zero_std": mean(zero_variance(rewards_PG), all_B[: len(rewards_PG)]),
        "completions/mean_length": mean(length_B, all_B),
        "completions/min_length": smallest(length_B),
        "completions/max_length": largest(length_B),
        "completions/mean_terminated_length": mean(length_B, ended_B),
        "completions/min_terminated_length": smallest(length_B[ended_B]),
        "completions/max_terminated_length": largest(length_B[ended_B]),
        "completions/clipped_ratio": mean(experience.truncated_B, all_B),
    }


def _prefixed(prefix: str, metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {f"{prefix}{name}": metric for name, metric in metrics.items()}
