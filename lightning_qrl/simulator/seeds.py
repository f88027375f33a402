"""The same settings with many seeds: what of an outcome is the settings', and what is chance.

The post shows one run, seed 0. Seeds draw durations, kicks and reward noise anew.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import Summary
from lightning_qrl.simulator.sweep import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """Runs that differ in nothing but their seed; means are over them.

    Attributes:
        first_seed: of them; the others follow.
        seeds: how many there were.
        diverged: share of them.
        without_step: share of them.
        final_reward: mean.
        reward_deviation: standard deviation of the final rewards, with n - 1.
        least_reward: of all.
        largest_reward: of all.
        final_drift: mean.
        optimizer_steps: mean.
        mean_staleness: mean.
        discarded: rollouts, mean.
    """

    first_seed: int
    seeds: int
    diverged: float
    without_step: float
    final_reward: float
    reward_deviation: float
    least_reward: float
    largest_reward: float
    final_drift: float
    optimizer_steps: float
    mean_staleness: float
    discarded: float


def over_seeds(
    settings: Settings, count: int, run: Callable[[Settings], Outcome]
) -> tuple[Seeds, tuple[str, ...]]:
    """Run settings with as many seeds, from their own up.

    Args:
        settings: with the first seed.
        count: of seeds, at least 2.
        run: gives the summary of one run, and notes on it.

    Raises:
        ValueError: a seed is too large.
    """
    seeds = range(settings.seed, settings.seed + count)
    made = [run(replace(settings, seed=seed)) for seed in seeds]
    notes = dict.fromkeys(note for _, own in made for note in own)
    return _together(settings.seed, [summary for summary, _ in made]), tuple(notes)


def _together(first: int, runs: Sequence[Summary]) -> Seeds:
    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(runs)

    rewards = [run.final_reward for run in runs]
    middle = mean(rewards)
    squares = math.fsum((reward - middle) ** 2 for reward in rewards)
    return Seeds(
        first_seed=first,
        seeds=len(runs),
        diverged=mean([run.diverged_at_step is not None for run in runs]),
        without_step=mean([run.why_no_step is not None for run in runs]),
        final_reward=middle,
        reward_deviation=math.sqrt(squares / (len(runs) - 1)),
        least_reward=min(rewards),
        largest_reward=max(rewards),
        final_drift=mean([run.final_drift for run in runs]),
        optimizer_steps=mean([run.optimizer_steps for run in runs]),
        mean_staleness=mean([run.mean_staleness for run in runs]),
        discarded=mean([run.discarded for run in runs]),
    )
