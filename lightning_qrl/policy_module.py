"""What every way of training a policy shares: the plan, the model, sampling, the optimizer.

Lightning calls, in this order: every callback's `setup` (precision callbacks declare rules),
`configure_model` (the model is built, the plan committed), the restoring of weights,
`configure_optimizers`. So the plan is complete before a layer is touched, and the optimizer sees
the layers as they will be trained.

B completions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_qrl.analysis.nonfinite import first_nonfinite, first_nonfinite_output
from lightning_qrl.analysis.pass_at_k import pass_at_k
from lightning_qrl.asynchrony.completions import join
from lightning_qrl.errors import UserError, described
from lightning_qrl.experience import Completion
from lightning_qrl.metrics import Metric, mean
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.precision.backends import find_chip
from lightning_qrl.resuming import begin_next_epoch
from lightning_qrl.rollouts.base import NonfiniteLogits, RolloutEngine
from lightning_qrl.seeding import derive_seed
from lightning_qrl.tasks.base import Prompt, Split, Task

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")  # of the trainer


class Sample(NamedTuple):
    """A completion as a person reads it."""

    prompt: str
    completion: str
    reward: float
    version: int  # weight version (optimizer steps taken) that wrote its last token


class PolicyModule(L.LightningModule):
    """A policy under a precision plan, that can be sampled and judged.

    Args:
        policy: the policy.
        task: judges completions.
        engine: samples completions.
        optimizer: the optimizer's settings.
        seed: decides every draw.

    Attributes:
        plan: what each linear layer computes in; callbacks declare, `configure_model` commits.
        model: the causal language model; there from `configure_model` on.
        provenance: plain values that say what a checkpoint came from; written into it.
        evaluations: held-out metrics by the number of optimizer steps; kept in checkpoints.
        samples: what was judged last, of each split.
        on_reward_error: what to do where the task raises: ``stop`` the run, or ``skip`` the reward.
        reward_errors: how often it raised.
        grad_norm: norm of the gradient that the optimizer stepped by last, before clipping.
        may_step: asked once that is known, before each optimizer step; a callback may refuse.
        mends: told of logits that are not finite; a callback may put other weights in place.
        around_rollouts: what is entered while rollouts are sampled, by who asks for it; evaluation
            is left alone.
    """

    model: PreTrainedModel
    on_reward_error: Literal["stop", "skip"] = "stop"

    def __init__(
        self, policy: Policy, task: Task, engine: RolloutEngine, optimizer: AdamWSettings, seed: int
    ) -> None:
        super().__init__()
        self.policy = policy
        self.task = task
        self.engine = engine
        self.optimizer_settings = optimizer
        self.seed = seed
        self.plan = PrecisionPlan()
        self.provenance: dict[str, str] = {}
        self.evaluations: dict[int, dict[str, float]] = {}
        self.samples: dict[Split, list[Sample]] = {}
        self.reward_errors = 0
        self.grad_norm = 0.0
        self.may_step: Callable[[], bool] = lambda: True
        self.mends: Callable[[str], bool] = lambda what: False
        self.around_rollouts: dict[str, Callable[[], AbstractContextManager[None]]] = {}

    @override
    def setup(self, stage: str) -> None:
        if self.trainer.precision not in PRECISIONS:
            raise UserError(
                f"trainer.precision={self.trainer.precision}: parameters are FP32 master weights; "
                f"use one of {', '.join(PRECISIONS)}"
            )

    @override
    def configure_model(self) -> None:
        if "model" not in self._modules:
            self.model = self.build_model()
            device = "auto" if self._trainer is None else self.trainer.strategy.root_device.type
            self.plan.commit(self.model, find_chip(device))

    def build_model(self) -> PreTrainedModel:
        """The model before the plan touches it."""
        return self.policy.build()

    @override
    def configure_optimizers(self) -> Any:
        exempt = [row.parameter for row in self.plan.table() if not row.weight_decay]
        weights = {id(self.model.get_parameter(name)) for name in exempt}
        # by identity: a tied weight goes by the embedding's name
        no_decay = (name for name, p in self.model.named_parameters() if id(p) in weights)
        steps = self.trainer.max_steps  # estimating it would make Lightning load data already
        optimizer, schedule = self.optimizer_settings.build(self.model, frozenset(no_decay), steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.plan.reseed(self._rounding_seed(batch_idx))

    def _rounding_seed(self, batch_idx: int) -> int:
        return derive_seed(self.seed, "rounding", self.global_step, batch_idx)

    def loss_of(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """The loss that a micro-batch's backward begins with, and what is logged of it."""
        raise NotImplementedError

    def first_nonfinite(self, batches: Sequence[tuple[Any, ...]]) -> str | None:
        """What is not finite first when these micro-batches, with their indices, are trained on."""

        def loss(batch: Any, batch_idx: int) -> Tensor:
            self.plan.reseed(self._rounding_seed(batch_idx))
            with self.trainer.precision_plugin.forward_context():
                return self.loss_of(batch)[0]

        return first_nonfinite(self.model, [partial(loss, *batch) for batch in batches])

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.grad_norm = float(torch.nn.utils.get_total_norm(grads))

    @override
    def configure_gradient_clipping(self, optimizer: Optimizer, *clipping: Any, **how: Any) -> None:
        """Clip, or have the optimizer leave everything as it is: it does without gradients."""
        if self.may_step():
            self.clip_gradients(optimizer, *clipping, **how)
        else:
            optimizer.zero_grad(set_to_none=True)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lightning_qrl"] = {**self.provenance, "evaluations": self.evaluations}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        begin_next_epoch(checkpoint)
        self.evaluations = dict(checkpoint.get("lightning_qrl", {}).get("evaluations", {}))
        for schedule in checkpoint.get("lr_schedulers", []):  # its place is restored, not its peak
            schedule["base_lrs"] = [self.optimizer_settings.lr for _ in schedule["base_lrs"]]

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        seed: int,
        *,
        limits: Sequence[int] | None = None,
        begun: Sequence[Completion] | None = None,
    ) -> list[Completion]:
        """Completions of the current policy, in the plan's rollout precision.

        What the plan leaves alone computes as in training: under the trainer's autocast, if any.

        Args:
            prompts: what is asked.
            samples: completions of each prompt.
            seed: decides every draw.
            limits: most new tokens of each prompt's completions; by default the engine's limit.
            begun: for each prompt a completion to go on with; ``samples`` is then 1.
        """
        if begun is None:
            ids = [self.policy.encode(prompt.text) for prompt in prompts]
        else:
            ids = [[*c.prompt_ids, *c.token_ids_N.tolist()] for c in begun]
        sampled = self._generate(ids, samples=samples, seed=seed, limits=limits)
        if begun is None:
            return sampled
        return [join(first, more) for first, more in zip(begun, sampled, strict=True)]

    def _generate(self, ids: Sequence[Sequence[int]], *, seed: int, **how: Any) -> list[Completion]:
        def generate() -> list[Completion]:
            self.plan.reseed(derive_seed(seed, "rounding"))
            self.engine.sync(self.model, self.global_step)
            with self.trainer.precision_plugin.forward_context(), self.plan.sampling():
                return self.engine.generate(ids, seed=seed, **how)

        try:
            return generate()
        except NonfiniteLogits as error:
            first = first_nonfinite_output(self.model, generate)
            what = f"{error} after {self.global_step} optimizer steps, first {first}"
            if not self.mends(what):
                raise UserError(f"{what}: training has diverged; lower optimizer.lr") from None
        return generate()

    @contextmanager
    def rolling_out(self) -> Iterator[None]:
        """For `sample`: what it samples is trained on."""
        with ExitStack() as stack:
            for entered in self.around_rollouts.values():
                stack.enter_context(entered())
            yield

    def judge(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], split: Split
    ) -> Tensor:
        """Rewards of completions, float32 [B], NaN where there is none; kept in `samples` too.

        Args:
            prompts: what was asked.
            completions: B completions, those of one prompt side by side.
            split: where the prompts are from.

        Raises:
            UserError: the task raised, or returned an infinite number or none at all.
        """
        texts = [self.policy.decode(completion.token_ids_N) for completion in completions]
        each = len(completions) // len(prompts)
        pairs = [(prompts[i // each], text) for i, text in enumerate(texts)]
        rewards = [self._reward(prompt, text) for prompt, text in pairs]
        judged = zip(pairs, rewards, strict=True)
        versions = [int(completion.versions_N[-1]) for completion in completions]
        self.samples[split] = [
            Sample(prompt.text, text, reward, version)
            for ((prompt, text), reward), version in zip(judged, versions, strict=True)
        ]
        return torch.tensor(rewards, dtype=torch.float32)

    def _reward(self, prompt: Prompt, text: str) -> float:
        """One completion's reward; NaN where the task has none (None or NaN)."""
        try:
            given = self.task.reward(prompt, text)
            reward = math.nan if given is None else float(given)
            if abs(reward) > torch.finfo(torch.float32).max:
                raise ValueError(f"the reward is {reward}, which is no FP32 number")
        except Exception as error:  # a task is anyone's code, and may raise anything
            if self.on_reward_error == "skip":
                self.reward_errors += 1
                return math.nan
            said = f"judging {text!r} for {prompt.text!r} failed: {described(error)}"
            mend = "correct the task, or go on without such rewards: grpo.on_reward_error=skip"
            raise UserError(f"task {type(self.task).__name__}: {said}; {mend}") from error
        return reward

    def _solved(self, reward: float) -> bool:
        try:
            return bool(self.task.solved(reward))
        except Exception as error:  # a task is anyone's code, and may raise anything
            said = f"solved({reward}) failed: {described(error)}; correct the task"
            raise UserError(f"task {type(self.task).__name__}: {said}") from error

    def evaluate(self, prompts: Sequence[Prompt], pass_at: Sequence[int] = ()) -> dict[str, Metric]:
        """Sample and judge completions of each prompt; training is not touched.

        Args:
            prompts: held-out prompts. The draws depend on the run's seed alone, so that two
                evaluations differ by the policy, not by luck.
            pass_at: numbers k to estimate pass@k for; the largest is how many completions of each
                prompt are sampled, one if there is none.

        Returns:
            ``reward`` and ``solved``, means over the completions that have a reward, and
            ``pass_at_K``, means over the prompts.
        """
        samples = max(pass_at, default=1)
        completions = self.sample(prompts, samples, derive_seed(self.seed, "evaluate"))
        rewards_B = self.judge(prompts, completions, "held_out")
        known_B = rewards_B.isfinite()
        solved_B = torch.tensor([not math.isnan(r) and self._solved(r) for r in rewards_B.tolist()])
        metrics = {"reward": mean(rewards_B, known_B), "solved": mean(solved_B, known_B)}
        solved_P = solved_B.view(len(prompts), samples).sum(dim=1)
        for k in pass_at:
            chances_P = pass_at_k(solved_P, samples, k)
            metrics[f"pass_at_{k}"] = mean(chances_P, torch.ones_like(solved_P, dtype=torch.bool))
        return metrics
