"""Runs as a calibration observes them, made by the reference model's own steps, with noise."""

from collections.abc import Sequence

import numpy as np

from lightning_qrl.simulator.calibrated.observed import Lags, ObservedRun
from lightning_qrl.simulator.constants import Learning
from lightning_qrl.simulator.dynamics import mismatch, next_drift, next_reward

TRUTH = Learning(
    staleness_scale=0.02,
    staleness_power=1.2,
    reward_start=0.35,
    reward_ceiling=0.9,
    reward_rate=0.08,
    mismatch_limit=0.4,
    gain=0.0,
    feedback=0.0,
    drift_cost=0.0,
)
FLOORS = {"bf16": 0.004, "nvfp4": 0.03}


def constant(lag: int, steps: int) -> tuple[Lags, ...]:
    """A constant lag after its ramp."""
    return tuple(((float(min(step, lag)), 1.0),) for step in range(steps))


def run(
    plan: str,
    lags: Sequence[Lags],
    seed: int,
    learning: Learning = TRUTH,
    noise: float = 0.02,
    *,
    mismatch_factor: float = 1.0,
) -> ObservedRun:
    """A run of the post's structure, without kicks.

    Args:
        plan: one of `FLOORS`.
        lags: of its steps.
        seed: of the noise.
        learning: the constants.
        noise: standard deviation of rewards; ten times that, relative, of mismatch.
        mismatch_factor: what no model knows.
    """
    rng = np.random.default_rng([seed, len(plan), int(100 * lags[-1][0][0])])
    drift, rewards, seen, shown = 0.0, [learning.reward_start], [], []
    for step, own in enumerate(lags):
        of = [mismatch([age], FLOORS[plan], learning) for age, _ in own]
        mean = sum(o.mean * share for o, (_, share) in zip(of, own, strict=True))
        dynamic = mean - (1 - learning.floor_share) * FLOORS[plan]
        drift = next_drift(drift, dynamic**2 / (dynamic + learning.half), learning)
        drift = min(drift, learning.drift_limit)
        shown.append(mean + learning.drift_in_mismatch * drift)
        seen.append(sum(rewards[max(0, step - round(age))] * share for age, share in own))
        rewards.append(next_reward(rewards[-1], mean, drift, learning))
    factor = mismatch_factor * np.exp(10 * noise * rng.standard_normal(len(lags)))
    return ObservedRun(
        name=f"{plan}-{lags[-1]}-{seed}",
        recipe=plan,
        setting=f"{plan}-{lags[-1]}",
        seed=seed,
        lags=tuple(lags),
        mismatch=tuple((np.array(shown) * factor).tolist()),
        reward=tuple((np.array(seen) + noise * rng.standard_normal(len(lags))).tolist()),
        held_out=tuple(
            (step, rewards[step] + 0.3 * noise * rng.standard_normal())
            for step in range(0, len(lags) + 1, 10)
        ),
        sampling_seconds=(0.5,) * len(lags),
        update_seconds=(0.25,) * len(lags),
        tokens=(100.0,) * len(lags),
        batch=8,
        group_size=4,
    )


def grid(
    seeds: Sequence[int] = (0, 1),
    lags: Sequence[int] = (0, 1, 3, 6),
    steps: int = 30,
    learning: Learning = TRUTH,
    noise: float = 0.02,
) -> list[ObservedRun]:
    """Both plans at each lag."""
    return [
        run(plan, constant(lag, steps), seed, learning, noise)
        for seed in seeds
        for lag in lags
        for plan in FLOORS
    ]
