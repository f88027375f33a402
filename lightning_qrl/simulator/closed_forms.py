"""What is known of asynchronous RL without running anything, and where it stops being true.

The drift recursion (`dynamics`) without kicks, at a constant effective mismatch e:

    d <- d + gain e + feedback e d² - decay d

rests where feedback e d² - decay d + gain e = 0. It has two such points while decay² >= 4 gain
feedback e²; the lower one attracts, above the upper one drift runs away. So beyond
e = decay / (2 sqrt(gain feedback)) nothing holds it.

Staleness, in versions between a rollout's first token and the step that consumes it:

* Huang: steady staleness = latency / step time x N_rollout / N_train. It counts the versions that
  appear while a rollout runs, and so leaves out how long it then waits. Read the ratio of the Ns as
  that of rates, rollouts made over rollouts taken: up to 1 the trainer waits for rollouts, and the
  formula is exact for that part; above 1 the trainer makes no more versions than it can, and it
  says too much.
* Applied Compute: with rho = v_R / v_T, the rates at which rollouts could be made and taken,

      mean = C M / B + rho                          rho < 1
      mean = C M / (rho B) + (2q + rho - 1) / (2 rho)   rho >= 1

  of C completions at work, B in a batch, M = E[longest of a group] / E[length], and a queue of q
  batches that drops its oldest. The second terms are the wait for the batch to fill and in the
  queue. It needs samplers that never pause and rollouts that start at all times alike: where all
  start at once, or samplers wait for a place in the queue, it does not hold.

Sources: the post's simulator; L. Huang, "Is Frontier Asynchronous RL Solved?" (2026); Applied
Compute, "Predicting and Controlling Staleness in Fully Asynchronous RL Training" (2026).
"""

import math

from lightning_qrl.simulator.constants import POST, Learning


def critical_effective(learning: Learning = POST.learning) -> float:
    """The effective mismatch above which drift has no fixed point; infinite without feedback."""
    grows = learning.gain * learning.feedback
    return learning.decay / (2 * math.sqrt(grows)) if grows else math.inf


def critical_dynamic(learning: Learning = POST.learning) -> float:
    """The dynamic mismatch whose effective part is `critical_effective`."""
    e = critical_effective(learning)
    return (e + math.sqrt(e * e + 4 * e * learning.half)) / 2


def critical_staleness(floor: float, learning: Learning = POST.learning) -> float:
    """Versions behind, the same for all rollouts, above which the drift has no fixed point.

    Args:
        floor: the mismatch that quantization alone makes.
        learning: the constants.

    Returns:
        0 if the floor alone is too much.
    """
    left = critical_dynamic(learning) - learning.floor_share * floor
    return float((max(0.0, left) / learning.staleness_scale) ** (1 / learning.staleness_power))


def plateau(effective: float, learning: Learning = POST.learning) -> float | None:
    """Where the drift comes to rest at a constant effective mismatch; None if nowhere."""
    points = fixed_points(effective, learning)
    return None if points is None else points[0]


def fixed_points(
    effective: float, learning: Learning = POST.learning
) -> tuple[float, float] | None:
    """The drift that attracts and the one beyond which it runs away; None if there are none.

    Args:
        effective: mismatch, at least 0.
        learning: the constants.
    """
    slope = 2 * learning.feedback * effective
    under = learning.decay**2 - 2 * learning.gain * effective * slope
    if under < 0:
        return None
    root = math.sqrt(under)
    if slope == 0:
        return learning.gain * effective / learning.decay, math.inf
    # The lower root without the difference of two nearly equal numbers.
    lower = 2 * learning.gain * effective / (learning.decay + root)
    return lower, (learning.decay + root) / slope


def steady_staleness(latency: float, step_time: float, rollout_to_train: float) -> float:
    """Huang's steady staleness: versions that appear while a rollout runs.

    Args:
        latency: of a rollout, in any unit of time.
        step_time: of an optimizer step alone, in the same.
        rollout_to_train: N_rollout / N_train.
    """
    return latency / step_time * rollout_to_train


def mean_staleness(
    *, concurrency: float, batch: float, tail: float, rho: float, queue: float
) -> float:
    """Applied Compute's mean staleness of what the trainer takes.

    Args:
        concurrency: completions at work at one time.
        batch: completions of a step.
        tail: mean of a group's longest completion over the mean completion.
        rho: completions that could be made over those that could be taken, per time.
        queue: batches that can wait; only where ``rho`` is at least 1.
    """
    if rho < 1:
        return concurrency * tail / batch + rho
    return concurrency * tail / (rho * batch) + (2 * queue + rho - 1) / (2 * rho)
