"""Drawing a run as it goes: numbers in, lines or a panel out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32
EQUAL_REWARDS = 0.8  # share of groups without signal from which on it is worth a word (as axolotl)
TRUNCATED = 0.3  # share of completions; the same source


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    Attributes:
        title: the recipe's name.
        step: optimizer steps done.
        total: optimizer steps of the run.
        seconds_left: estimated time left; None before there is a measurement.
        rewards: mean reward of every step so far.
        metrics: the newest metrics by their full names.
        learns_from_rewards: whether the loss does.
    """

    title: str
    step: int
    total: int
    seconds_left: float | None
    rewards: Sequence[float]
    metrics: dict[str, float]
    learns_from_rewards: bool = True

    def shown(self) -> list[tuple[str, str]]:
        """The numbers that tell whether a run is healthy, as far as they were measured."""
        names = {
            "entropy": ("train/entropy", "{:.3f}"),
            "grad norm": ("train/grad_norm", "{:.3f}"),
            "|Δlogprob|": ("train/sampling/sampling_logp_difference/mean", "{:.1e}"),
            "loss": ("train/loss", "{:.4f}"),
            "tokens/s": ("train/tokens_per_second", "{:,.0f}"),
        }
        found = ((label, *names[label]) for label in names)
        return [
            (label, form.format(self.metrics[key]))
            for label, key, form in found
            if key in self.metrics
        ]

    def explained(self) -> dict[str, str]:
        """What is out of its healthy range, by metric: one line on what it means."""
        equal = self.metrics.get("train/frac_reward_zero_std", 0.0)
        truncated = self.metrics.get("train/completions/clipped_ratio", 0.0)
        missing = self.metrics.get("train/rewards_missing", 0.0)
        errors = self.metrics.get("train/reward_errors", 0.0)
        known = not missing or self.metrics.get("train/reward_std", 1.0) > 0
        said = {}
        if equal > EQUAL_REWARDS and known and self.learns_from_rewards:
            said["train/frac_reward_zero_std"] = (
                f"{equal:.0%} of the groups give no gradient: all their rewards are equal, the "
                "task is too easy or too hard for the policy; try grpo.dynamic_sampling, a larger "
                "grpo.group_size or another difficulty"
            )
        if truncated > TRUNCATED:
            said["train/completions/clipped_ratio"] = (
                f"{truncated:.0%} of the completions were cut off at the length limit; try a "
                "larger rollout.max_new_tokens or grpo.overlong_buffer"
            )
        if missing > 0 and self.learns_from_rewards:
            said["train/rewards_missing"] = (
                f"{missing:.0f} completions have no reward: they get no gradient"
            )
        if errors > 0:
            said["train/reward_errors"] = (
                f"the task failed on {errors:.0f} completions, which grpo.on_reward_error=skip "
                "passes over; stop instead to see the error"
            )
        return said


def plain_line(progress: Progress) -> str:
    """One line of text for a log file."""
    reward = f"reward {progress.rewards[-1]:.3f}  " if progress.rewards else ""
    numbers = "  ".join(f"{label} {value}" for label, value in progress.shown())
    left = duration(progress.seconds_left)
    return f"step {progress.step}/{progress.total}  {reward}{numbers}  {left} left"


def panel(progress: Progress) -> RenderableType:
    """The live panel for a terminal."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        f"step {progress.step}/{progress.total}",
        ProgressBar(total=progress.total, completed=progress.step, width=WIDTH),
        f"{duration(progress.seconds_left)} left",
    )
    reward = Text()
    if progress.rewards:
        reward = Text.assemble(
            "reward ",
            (f"{progress.rewards[-1]:.3f} ", "bold green"),
            (sparkline(progress.rewards), "green"),
        )
    # wraps between numbers, never between a label and its number
    shown = (Text.assemble(f"{label}\u00a0", (value, "bold")) for label, value in progress.shown())
    numbers = Text("  ").join(shown)
    notes = [Text(text, "yellow") for text in progress.explained().values()]
    return Panel(Group(bar, reward, numbers, *notes), title=progress.title, expand=False)


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Block characters for a series from 0, or its minimum if lower, to its maximum.

    Longer series are averaged down to ``width``; a value that is not finite leaves a gap.
    """
    bins = min(width, len(values))
    edges = [round(i * len(values) / bins) for i in range(bins + 1)] if bins else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BARS[round((mean - low) * scale)] if math.isfinite(mean) else " " for mean in means
    )


def duration(seconds: float | None) -> str:
    """``1h02m``, ``3m05s`` or ``12s``; ``?`` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
