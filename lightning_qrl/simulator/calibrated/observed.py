"""What a calibration needs to know of a run, wherever it was recorded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lightning_qrl.errors import UserError

LEAST_STEPS = 10
Lags = tuple[tuple[float, float], ...]  # versions behind, and share of the tokens


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """A run of training, of S optimizer steps.

    Attributes:
        name: of the run.
        recipe: what its precision plan is called.
        plan_text: what tells plans apart that are called the same.
        alike: settings that all runs of a calibration must share, by name.
        setting: the same for runs that differ in their seed alone.
        seed: of the run.
        lags: [S] of each step, how old its tokens were: versions behind, with shares that add up
            to 1.
        mismatch: [S] mean |Δlogprob| of each step, in nats.
        reward: [S] mean reward of what each step was trained on, so of the versions that sampled
            it.
        held_out: reward on held-out prompts, by the steps that made the weights.
        sampling_seconds: [S] of each step.
        update_seconds: [S] the same.
        tokens: [S] that each step was trained on.
        discarded: groups that became too old.
        batch: groups of a step.
        group_size: completions of a group.

    Raises:
        UserError: it is too short, a number in it is not finite, or a mismatch is negative.
    """

    name: str
    recipe: str
    plan_text: str = ""
    alike: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    setting: str
    seed: int = 0
    lags: tuple[Lags, ...]
    mismatch: tuple[float, ...]
    reward: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...] = ()
    sampling_seconds: tuple[float, ...] = ()
    update_seconds: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()
    discarded: float = 0.0
    batch: int = 1
    group_size: int = 1

    def __post_init__(self) -> None:
        steps = len(self.mismatch)
        if steps < LEAST_STEPS:
            raise UserError(
                f"run {self.name} has {steps} steps, and a calibration needs at least "
                f"{LEAST_STEPS} of each; leave it out, or train for longer"
            )
        if not len(self.lags) == len(self.reward) == steps:
            raise UserError(
                f"run {self.name} has lags of {len(self.lags)} steps, mismatch of {steps} and "
                f"rewards of {len(self.reward)}; leave it out"
            )
        held_out = [reward for _, reward in self.held_out]
        if not all(map(math.isfinite, [*self.mismatch, *self.reward, *held_out])):
            raise UserError(
                f"run {self.name} has a mismatch or a reward that is not finite; leave it out"
            )
        if min(self.mismatch) < 0:
            raise UserError(
                f"run {self.name} has a mismatch of {min(self.mismatch):g}, and a mean of "
                "|Δlogprob| is never negative; leave it out"
            )

    @property
    def synchronous(self) -> bool:
        """Whether no token is ever behind."""
        return not any(lag for lags in self.lags for lag, _ in lags)

    @property
    def largest_lag(self) -> float:
        """Of any token, in versions."""
        return max(lag for lags in self.lags for lag, share in lags if share)

    @property
    def usual_lag(self) -> float:
        """Mean of the second half of the steps: without the ramp at the start."""
        late = self.lags[len(self.lags) // 2 :]
        return sum(lag * share for lags in late for lag, share in lags) / len(late)
