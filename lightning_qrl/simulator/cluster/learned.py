"""Drift and reward over the ages that a cluster's steps had: the equations of `dynamics`.

Deviation from the reference model: no kicks and no noise, so that two clusters differ by what they
do alone.
"""

from collections.abc import Sequence

from lightning_qrl.simulator.cluster.outcome import Learned
from lightning_qrl.simulator.constants import Learning
from lightning_qrl.simulator.dynamics import (
    collapsed_reward,
    divergence_step,
    mismatch,
    next_drift,
    next_reward,
)


def learned(
    batches: Sequence[Sequence[float]], updates: int, floor: float, learning: Learning
) -> Learned:
    """What the optimizer steps did.

    Args:
        batches: of each phase, the ages of its rollouts in versions.
        updates: optimizer steps on each.
        floor: what quantization alone makes.
        learning: the constants.
    """
    of_steps = [
        mismatch([age + update for age in ages], floor, learning)
        for ages in batches
        for update in range(updates)
    ]
    drifts, drift = [], 0.0
    for of in of_steps:
        drift = min(next_drift(drift, of.effective, learning), learning.drift_limit)
        drifts.append(drift)
    diverged = divergence_step(drifts, learning)
    rewards, reward = [], learning.reward_start
    for number, of in enumerate(of_steps):
        if diverged is not None and number >= diverged:
            reward = collapsed_reward(reward, learning)
        else:
            reward = next_reward(reward, of.mean, drifts[number], learning)
        rewards.append(reward)
    return Learned(
        mismatch=tuple(of.mean for of in of_steps),
        effective=tuple(of.effective for of in of_steps),
        drift=tuple(drifts),
        reward=tuple(rewards),
        diverged_at_step=diverged,
    )
