"""The numbers of the reference model, and nothing else: those of "The 4-bitter Lesson".

One value of `Constants` holds all that the model does not take from its settings, so that another
set of numbers is another value, not another model; the page gets this very value as JSON. Times are
in the model's own unit.
"""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Precision = Literal["bf16", "fp8", "fp4"]
Backward = Literal["high_precision", "dequantized"]
Horizon = Literal["short", "med", "long"]


def _table(**values: Any) -> Any:
    """A read-only mapping as a field's default."""
    return field(default_factory=lambda: MappingProxyType(values))


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long things take.

    A rollout lasts (``rollout_least`` + min(``rollout_extra_limit``, -tail ln(1 - ``draw_share``
    u))) x ``rollout_factor`` x h, with u uniform and (h, tail) from ``horizons``. A run lasts
    round(``window`` (1 + ``window_slope`` (h - 1))).

    Attributes:
        tick: of the clock.
        window: of a run with h = 1.
        window_slope: what h adds to it.
        horizons: by name, h and tail.
        rollout_least: the shortest rollout with h = 1, in BF16.
        rollout_extra_limit: the most that the tail adds to it.
        draw_share: keeps the logarithm finite.
        rollout_factor: by precision of the sampler.
        step: a trainer's step in BF16.
        step_factor: by precision and backward.
        broadcast_per_bit: a broadcast lasts so long for each bit of a weight.
        bits: of a weight, by precision.
        last_start: no rollout starts with less time left.
    """

    tick: float = 0.02
    window: float = 48.0
    window_slope: float = 0.47
    horizons: MappingProxyType[str, tuple[float, float]] = _table(
        short=(1.0, 1.7), med=(1.8, 2.6), long=(3.2, 3.6)
    )
    rollout_least: float = 1.5
    rollout_extra_limit: float = 9.0
    draw_share: float = 0.988
    rollout_factor: MappingProxyType[str, float] = _table(bf16=1.0, fp8=0.5, fp4=0.25)
    step: float = 1.7
    step_factor: MappingProxyType[str, MappingProxyType[str, float]] = field(
        default_factory=lambda: MappingProxyType(
            {
                "bf16": MappingProxyType({"high_precision": 1.0, "dequantized": 1.0}),
                "fp8": MappingProxyType({"high_precision": 0.768, "dequantized": 0.837}),
                "fp4": MappingProxyType({"high_precision": 1.022, "dequantized": 1.095}),
            }
        )
    )
    broadcast_per_bit: float = 0.04
    bits: MappingProxyType[str, int] = _table(bf16=16, fp8=8, fp4=4)
    last_start: float = 0.3


@dataclass(frozen=True, kw_only=True)
class Floors:
    """The mismatch that quantization alone makes, as mean |Δlogprob|.

    f = base + (p - base) x ``no_tail`` x (``tail`` if the last 15% is BF16) x (``shared_experts``
    if those are BF16) + (``plain_fp4`` if FP4 without four-over-six).

    Attributes:
        precision: p by precision; ``bf16`` is the base.
        four_over_six: p of FP4 with it.
        no_tail: p was measured with the last 15% in BF16; this takes that away.
        tail: the BF16 tail's factor.
        shared_experts: that of shared experts in BF16.
        plain_fp4: what FP4 without four-over-six adds.
    """

    precision: MappingProxyType[str, float] = _table(bf16=0.0103, fp8=0.0203, fp4=0.0328)
    four_over_six: float = 0.0313
    no_tail: float = 1.6
    tail: float = 0.625
    shared_experts: float = 0.8
    plain_fp4: float = 0.008


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How mismatch becomes drift, and drift costs reward; `dynamics` has the equations.

    Attributes:
        staleness_scale: mismatch of a rollout one version behind.
        staleness_power: its exponent in the versions behind.
        floor_share: of the floor in the dynamic mismatch.
        half: the dynamic mismatch of which half is effective.
        gain: drift that a unit of effective mismatch makes.
        feedback: what drift squared multiplies that with.
        decay: share of the drift that the optimizer takes back in a step.
        drift_limit: it grows no further.
        divergence: the drift above which a run has diverged.
        drift_in_mismatch: what a unit of drift adds to the mismatch that is shown.
        reward_start: before the first step.
        reward_ceiling: what the policy tends to.
        reward_rate: share of the way there, in a step without mismatch and drift.
        mismatch_limit: the mean mismatch at which nothing but ``least_progress`` is left.
        least_progress: share of a step's progress that no mismatch takes.
        drift_cost: share of a step's progress that a unit of drift takes.
        drift_cost_limit: the most that it takes.
        collapse: factor of the reward in a step of a run that has diverged.
        collapse_loss: what such a step takes besides.
        reward_least: no such step goes below.
        reward_noise: width of the uniform noise of a step.
    """

    staleness_scale: float = 0.011
    staleness_power: float = 1.5
    floor_share: float = 0.5
    half: float = 0.02
    gain: float = 6.0
    feedback: float = 0.65
    decay: float = 0.12
    drift_limit: float = 8.8
    divergence: float = 2.2
    drift_in_mismatch: float = 0.05
    reward_start: float = 0.45
    reward_ceiling: float = 0.88
    reward_rate: float = 0.06
    mismatch_limit: float = 0.22
    least_progress: float = 0.15
    drift_cost: float = 0.12
    drift_cost_limit: float = 0.5
    collapse: float = 0.8
    collapse_loss: float = 0.01
    reward_least: float = 0.08
    reward_noise: float = 0.012


@dataclass(frozen=True, kw_only=True)
class Kick:
    """A sudden rise of the drift in FP4.

    Attributes:
        size: of the rise.
        probability: in a step.
    """

    size: float
    probability: float


@dataclass(frozen=True, kw_only=True)
class Constants:
    """All numbers of the model.

    Attributes:
        times: how long things take.
        floors: what quantization alone costs.
        learning: mismatch, drift, reward.
        high_precision_kick: FP4 with that backward.
        plain_kick: FP4 without four-over-six.
        seeds: of the streams of durations, kicks and reward noise.
    """

    times: Times = Times()
    floors: Floors = Floors()
    learning: Learning = Learning()
    high_precision_kick: Kick = Kick(size=0.4, probability=0.08)
    plain_kick: Kick = Kick(size=0.3, probability=0.05)
    seeds: tuple[int, int, int] = (97, 41, 13)


POST = Constants()
