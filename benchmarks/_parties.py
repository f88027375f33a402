"""Whose GRPO step is timed: ours under Lightning, ours in a plain loop, TRL's `GRPOTrainer`.

Each party trains the same policy on the same prompts in the same order, and runs a segment of a few
steps at a time, so that several can take turns in one process.
"""

import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import lightning as L
import torch

from lightning_qrl.build import build
from lightning_qrl.data import RolloutData
from lightning_qrl.experience import split_for_updates
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.policy import Policy
from lightning_qrl.recipe import load_recipe
from lightning_qrl.tasks.base import Prompt, Task

GROUP, NEW_TOKENS = 16, 8
LR = 1e-6  # too small to change the lengths of completions, so that all parties do the same work
AWAY = ["held_out_evaluation", "sampled_completions", "live_view", "checkpoint"]
PARTS = ["sampling", "judging", "batch", "forward", "backward", "optimizer", "loop"]


class Stopwatch:
    """Times methods of objects; a part's time is its own, without the parts it calls."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._stack = ["loop"]
        self._since = time.perf_counter()

    def watch(self, owner: Any, method: str, part: str) -> None:
        """From now on ``owner.method`` counts as ``part``."""
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time inside counts as ``name``."""
        self._book()
        self._stack.append(name)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    def step_ended(self) -> None:
        """One step is over, the next begins."""
        self._book()
        self.steps.append(dict(self._parts))
        self._parts.clear()

    def drop_first(self, before: int) -> None:
        """Forget the first step since ``before`` steps: its beginning lies outside the segment."""
        del self.steps[before]

    def milliseconds(self) -> dict[str, float]:
        """Medians of each part and, as ``step``, of the whole."""
        parts = {p: 1e3 * statistics.median(s.get(p, 0.0) for s in self.steps) for p in PARTS}
        return {"step": 1e3 * statistics.median(sum(s.values()) for s in self.steps), **parts}

    def _book(self) -> None:
        now = time.perf_counter()
        self._parts[self._stack[-1]] += now - self._since
        self._since = now


class Party(Protocol):
    """Someone who can train a few steps."""

    stopwatch: Stopwatch

    def segment(self, steps: int) -> None:
        """Train ``steps`` timed steps, after one that is not counted."""


class Clock(L.Callback):
    """Tells a stopwatch when a step of Lightning's is over."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_batch_end(self, *_: Any) -> None:
        """A batch is an optimizer step here."""
        self.stopwatch.step_ended()


class Ours:
    """A recipe under Lightning, as `qrl fit` runs it but for logging, checkpoints and the view."""

    def __init__(self, recipe: str, prompts: int, overrides: Sequence[str] = ()) -> None:
        sizes = [f"grpo.prompts_per_rollout={prompts}", f"optimizer.lr={LR}", *overrides]
        self.run = build(load_recipe(recipe, sizes, without=AWAY))
        assert isinstance(self.run.module, GRPOModule)
        assert isinstance(self.run.data, RolloutData)
        self.module, self.data = self.run.module, self.run.data
        self.stopwatch = Stopwatch()
        for owner, method, part in (
            (self.module.engine, "generate", "sampling"),
            (self.module, "judge", "judging"),
            (self.module, "collect", "batch"),
            (self.module, "training_step", "forward"),
            (self.module, "backward", "backward"),
            (self.module, "optimizer_step", "optimizer"),
        ):
            self.stopwatch.watch(owner, method, part)

    def segment(self, steps: int) -> None:
        """Train ``steps`` timed steps."""
        before = len(self.stopwatch.steps)
        callbacks = [*self.run.callbacks.values(), Clock(self.stopwatch)]
        settings = {**self.run.trainer_args, "max_steps": steps + 1, "accelerator": "cpu"}
        off = {"logger": False, "enable_checkpointing": False}
        L.Trainer(**settings, **off, callbacks=callbacks).fit(self.module, self.data)
        self.stopwatch.drop_first(before)


class PlainLoop:
    """The same module and data in a Python loop: what a step costs without Lightning's loop."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours  # has run a segment: the module then knows its trainer's precision
        self.stopwatch = Stopwatch()

    def segment(self, steps: int) -> None:
        """Train ``steps`` timed steps."""
        module, data = self.ours.module, self.ours.data
        before = len(self.stopwatch.steps)
        optimizer = module.configure_optimizers()["optimizer"]
        module.log_dict = lambda *_, **__: None  # logging is Lightning's
        for phase in range(steps + 1):
            experience = module.collect(data.phase_prompts(phase), phase)
            (batch,) = split_for_updates(experience, [torch.arange(len(experience))], 1)
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            module.on_before_optimizer_step(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            self.stopwatch.step_ended()
        del module.log_dict
        self.stopwatch.drop_first(before)


class TRL:
    """TRL's `GRPOTrainer` at its best on a CPU; `grpo_step` says what is set.

    Args:
        policy: the policy.
        task: judges completions.
        prompts: of all steps, in their order.
        each: prompts of a step.
    """

    def __init__(self, policy: Policy, task: Task, prompts: Sequence[Prompt], each: int) -> None:
        self.policy, self.task = policy, task
        self.prompts, self.completions = prompts, each * GROUP
        self.model = policy.build()
        self.stopwatch = Stopwatch()

    def segment(self, steps: int) -> None:
        """Train ``steps`` timed steps."""
        from transformers import PrinterCallback, TrainerCallback
        from trl import GRPOTrainer

        stopwatch, before = self.stopwatch, len(self.stopwatch.steps)

        class StepEnd(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                stopwatch.step_ended()

        with tempfile.TemporaryDirectory() as folder:
            trainer = GRPOTrainer(
                model=self.model,
                args=self._config(folder, steps + 1),
                processing_class=self.policy.tokenizer,
                reward_funcs=self._reward(),
                train_dataset=self._dataset(),
                callbacks=[StepEnd()],
            )
            for owner, method, part in (
                (trainer, "_generate_single_turn", "sampling"),
                (trainer, "_calculate_rewards", "judging"),
                (trainer, "_prepare_inputs", "batch"),
                (trainer, "compute_loss", "forward"),
                (trainer.accelerator, "backward", "backward"),
                (trainer.accelerator, "clip_grad_norm_", "optimizer"),
            ):
                stopwatch.watch(owner, method, part)
            trainer.remove_callback(PrinterCallback)
            trainer.create_optimizer()
            stopwatch.watch(trainer.optimizer, "step", "optimizer")
            trainer.train()
        stopwatch.drop_first(before)

    def _config(self, folder: str, steps: int) -> Any:
        from trl import GRPOConfig

        return GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=self.completions,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            adam_beta2=0.98,
            optim="adamw_torch",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
        )

    def _dataset(self) -> Any:
        from datasets import Dataset

        rows = [{"prompt": p.text, "answer": p.answer} for p in self.prompts]
        return Dataset.from_list(rows)

    def _reward(self) -> Callable[..., list[float]]:
        task = self.task

        def exact(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
            rows = zip(prompts, completions, answer, strict=True)
            return [task.reward(Prompt(prompt, a), text) for prompt, text, a in rows]

        return exact
