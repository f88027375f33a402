"""What a comparison measures in a run: one number each, of the metrics that it logged.

What is a size by nature (a gradient norm, a mismatch, a speed, a memory) is compared by ratio: its
noise grows with it, so differences of logarithms are alike over seeds where plain ones are not.
Rewards, shares, counts and entropies are compared by difference.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_qrl.tracking.histories import History

Histories = Mapping[str, History]  # by a metric's name

HELD_OUT = "eval/reward"
TRAINING = "train/reward"
MISMATCH = "train/sampling/sampling_logp_difference/mean"
ESS = "rollout_corr/ess_token"
NORM = "train/grad_norm"
ENTROPY = "train/entropy"
SPEED = "train/tokens_per_second"
MEMORY = ("perf/max_memory_allocated_gb", "perf/max_memory_rss_gb")  # of the GPU, of the process
METRICS = (HELD_OUT, TRAINING, MISMATCH, ESS, NORM, ENTROPY, SPEED, *MEMORY)

SPIKE = 3.0  # a spike is a gradient norm above so many times the run's median
LATE = 0.1  # of the steps: the end
SHARE = 0.9  # of what the baseline gains


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a run.

    Attributes:
        key: its name in JSON and CSV, such as ``held_out_reward``.
        label: its name for people, such as ``held-out reward``.
        unit: empty where it has none.
        better: which way is an improvement; None where neither is.
        form: a format for one value, such as ``{:.3f}``.
        about: one line on how it is made of the logged metrics.
        scale: how arms are set against the baseline. ``ratio``: the difference is one of natural
            logarithms, e to the power of it says how many times the baseline's value the arm's is.
    """

    key: str
    label: str
    unit: str
    better: Literal["higher", "lower"] | None
    form: str
    about: str
    scale: Literal["difference", "ratio"] = "difference"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a measure is taken.

    Attributes:
        measure: what is taken.
        metric: what it is taken of.
        of: from the metric's history, which has a step, to the number; None where there is none.
    """

    measure: Measure
    metric: str
    of: Callable[[History], float | None]


class Goal(NamedTuple):
    """A held-out reward to reach."""

    reward: float
    why: str  # what it is, for a sentence; empty if it was given


def standard(logged: Collection[str], goal: Goal | None) -> list[Rule]:
    """The measures of every comparison, as far as the metrics are there.

    Args:
        logged: names of the metrics that any run has.
        goal: None: steps to it are not measured.
    """
    rules = [
        Rule(Measure("held_out_reward", "held-out reward", "", "higher", "{:.3f}",
                     f"the last {HELD_OUT}"), HELD_OUT, last),
        _area(HELD_OUT if HELD_OUT in logged else TRAINING),
    ]  # fmt: skip
    if goal is not None:
        rules.append(_steps_to(goal))
    rules += [
        Rule(Measure("mismatch", "|Δlogprob|", "nats", "lower", "{:.3g}",
                     f"mean over steps of {MISMATCH}", "ratio"), MISMATCH, mean),
        Rule(Measure("ess", "ESS", "", "higher", "{:.3f}",
                     f"mean over steps of {ESS}"), ESS, mean),
        Rule(Measure("largest_grad_norm", "largest gradient norm", "", "lower", "{:.3g}",
                     f"of {NORM}, before it is clipped; infinite if any is not finite", "ratio"),
             NORM, highest),
        Rule(Measure("spikes", "spikes", "", "lower", "{:.1f}",
                     f"steps with {NORM} above {SPIKE:g} times the run's median of those above "
                     "zero, or not finite"),
             NORM, spikes),
        Rule(Measure("final_entropy", "entropy at the end", "nats", None, "{:.3f}",
                     f"mean of {ENTROPY} over the last {LATE:.0%} of the steps"), ENTROPY, late),
        Rule(Measure("tokens_per_second", "tokens/s", "", "higher", "{:,.0f}",
                     f"median over steps of {SPEED}", "ratio"), SPEED, median),
    ]  # fmt: skip
    memory = next((name for name in MEMORY if name in logged), MEMORY[-1])
    rules.append(
        Rule(Measure("peak_memory", "peak memory", "GiB", "lower", "{:.2f}",
                     f"the largest {memory}", "ratio"), memory, largest)
    )  # fmt: skip
    return [rule for rule in rules if rule.metric in logged]


def further(metric: str) -> list[Rule]:
    """Of any metric, its last value and its mean."""
    return [
        Rule(Measure(f"{metric}/last", f"{metric}, last", "", None, "{:.4g}",
                     f"the last {metric}"), metric, last),
        Rule(Measure(f"{metric}/mean", f"{metric}, mean", "", None, "{:.4g}",
                     f"mean over steps of {metric}"), metric, mean),
    ]  # fmt: skip


def default_goal(histories: Sequence[History]) -> Goal | None:
    """`SHARE` of the way that the baseline goes, from its first evaluation to its last one.

    Both are means over seeds. So it fits any task's rewards, and is late on the curve but not in
    the noise of its end.

    Args:
        histories: of the held-out reward, one a seed of the baseline.

    Returns:
        None if the baseline does not get better, or there is none.
    """
    ends = [history.values[[0, -1]] for history in histories]
    ends = [pair for pair in ends if np.isfinite(pair).all()]
    if not ends:
        return None
    first, end = np.mean(ends, axis=0)
    if not end > first:
        return None
    reward = float(first + SHARE * (end - first))
    return Goal(
        reward, f"{SHARE:.0%} of the way from {first:.3f} to {end:.3f} that the baseline goes"
    )


def _area(metric: str) -> Rule:
    label = "area under the curve" if metric == HELD_OUT else "area under the training curve"
    about = f"{metric} over steps (trapezoids), divided by the range of steps: a mean over the run"
    return Rule(Measure("reward_area", label, "", "higher", "{:.3f}", about), metric, area)


def _steps_to(goal: Goal) -> Rule:
    def reached(history: History) -> float | None:
        there = history.steps[np.isfinite(history.values) & (history.values >= goal.reward)]
        return float(there[0]) if there.size else None

    about = f"the first step at which {HELD_OUT} is {goal.reward:.3f} or more"
    about += f", {goal.why}" if goal.why else ""
    label = f"steps to {goal.reward:.3f}"
    measure = Measure("steps_to_threshold", label, "steps", "lower", "{:.0f}", about)
    return Rule(measure, HELD_OUT, reached)


def last(history: History) -> float:
    """The value at the last step."""
    return float(history.values[-1])


def mean(history: History) -> float:
    """Over steps."""
    return float(history.values.mean())


def median(history: History) -> float:
    """Over steps."""
    return float(np.median(history.values))


def largest(history: History) -> float:
    """Over steps; NaN if any is."""
    return float(history.values.max())


def highest(history: History) -> float:
    """Over steps; infinite if any is not finite: a NaN came of something that was too large."""
    values = history.values
    return float(values.max()) if np.isfinite(values).all() else math.inf


def area(history: History) -> float:
    """By trapezoids, over the range of steps; of one step, its value."""
    steps, values = history
    if steps.size == 1:
        return float(values[0])
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


def late(history: History) -> float:
    """Mean of the last steps, `LATE` of them, at least one."""
    count = max(1, round(LATE * history.values.size))
    return float(history.values[-count:].mean())


def spikes(history: History) -> float:
    """How many there are, see `is_spike`."""
    return float(is_spike(history).sum())


def is_spike(history: History) -> NDArray[np.bool_]:
    """Where a value is above `SPIKE` times the median of the positive ones, or not finite; [S].

    Zeros are steps without a signal: where they are many, a median over them would be zero too.
    """
    values = history.values
    finite = np.isfinite(values)
    usual = values[finite & (values > 0)]
    limit = SPIKE * np.median(usual) if usual.size else 0.0
    return np.asarray(~finite | (values > limit))
