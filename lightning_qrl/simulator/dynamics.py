"""What one optimizer step does to drift and reward: pure functions.

s(g) = scale g^power is what a rollout g versions behind costs; f is the floor.

    mean      = mean(s + f)
    dynamic   = mean(s) + floor_share f
    effective = dynamic² / (dynamic + half)
    drift    <- max(0, drift + gain effective + feedback effective drift² - decay drift), + kick
    reward   <- reward + rate (ceiling - reward) max(least, 1 - (mean / limit)²) (1 - lost)
    lost      = min(drift_cost_limit, drift_cost drift)

Source: the simulator of "The 4-bitter Lesson". Sums go from left to right, so that the page's
numbers are these to the last bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_qrl.simulator.constants import POST, Constants, Learning
from lightning_qrl.simulator.settings import Settings


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Of the batch of one step, as mean |Δlogprob|.

    Attributes:
        mean: what a user would measure, without drift.
        dynamic: what acts on the drift.
        effective: what of that the optimizer cannot average away.
    """

    mean: float
    dynamic: float
    effective: float


def floor(settings: Settings, constants: Constants = POST) -> float:
    """The mismatch that quantization alone makes; `constants.Floors` has the equation."""
    floors, fp4 = constants.floors, settings.precision == "fp4"
    base, own = floors.precision["bf16"], floors.precision[settings.precision]
    if fp4 and settings.four_over_six:
        own = floors.four_over_six
    factor = floors.no_tail
    factor *= floors.tail if settings.bf16_tail else 1.0
    factor *= floors.shared_experts if settings.shared_experts else 1.0
    plain = floors.plain_fp4 if fp4 and not settings.four_over_six else 0.0
    return base + (own - base) * factor + plain


def mismatch(ages: Sequence[float], floor: float, learning: Learning = POST.learning) -> Mismatch:
    """Of a batch whose rollouts are so many versions behind.

    Args:
        ages: at least one, none negative.
        floor: what quantization alone makes.
        learning: the constants.
    """
    total = cost = 0.0
    for age in ages:
        own = learning.staleness_scale * age**learning.staleness_power
        total += own + floor
        cost += own
    dynamic = cost / len(ages) + learning.floor_share * floor
    return Mismatch(total / len(ages), dynamic, effective(dynamic, learning))


def effective(dynamic: float, learning: Learning = POST.learning) -> float:
    """What of a dynamic mismatch the optimizer cannot average away."""
    return dynamic * dynamic / (dynamic + learning.half)


def next_drift(drift: float, effective: float, learning: Learning = POST.learning) -> float:
    """The drift after a step, before kicks and without the limit."""
    grown = learning.gain * effective + learning.feedback * effective * drift * drift
    return max(0.0, drift + grown - learning.decay * drift)


def next_reward(
    reward: float, mean: float, drift: float, learning: Learning = POST.learning
) -> float:
    """The reward after a step of a run that has not diverged, without noise."""
    kept = max(learning.least_progress, 1.0 - (mean / learning.mismatch_limit) ** 2)
    lost = min(learning.drift_cost_limit, learning.drift_cost * drift)
    return reward + learning.reward_rate * (learning.reward_ceiling - reward) * kept * (1.0 - lost)


def collapsed_reward(reward: float, learning: Learning = POST.learning) -> float:
    """The reward after a step of a run that has diverged, without noise."""
    return max(learning.reward_least, learning.collapse * reward - learning.collapse_loss)


def rewards(
    steps: Iterable[tuple[float, float, float]],
    diverged: int | None,
    learning: Learning = POST.learning,
) -> Iterator[float]:
    """The reward after each step.

    Args:
        steps: mean mismatch, drift after it, and a uniform number for the noise, of each.
        diverged: the step from which on the reward collapses, if there is one.
        learning: the constants.
    """
    reward = learning.reward_start
    for number, (mean, drift, noise) in enumerate(steps):
        if diverged is not None and number >= diverged:
            reward = collapsed_reward(reward, learning)
        else:
            reward = next_reward(reward, mean, drift, learning)
        reward += (noise - 0.5) * learning.reward_noise
        yield reward


def divergence_step(drifts: Sequence[float], learning: Learning = POST.learning) -> int | None:
    """The first step of the last unbroken run above the limit, if it reaches the end; else None."""
    first = len(drifts)
    while first and drifts[first - 1] > learning.divergence:
        first -= 1
    return first if first < len(drifts) else None
