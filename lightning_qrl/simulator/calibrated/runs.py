"""Recorded runs side by side, and the numbers of them that a fit is held against.

Three kinds count: each step's mismatch, each step's reward, and held-out rewards.

W numbers that count, C sets of constants, R runs, S steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_qrl.simulator.calibrated.observed import ObservedRun
from lightning_qrl.simulator.calibrated.trajectories import Ages, Floats, Trajectories

KINDS = ("mismatch", "reward", "held_out")


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs, ready to be fitted.

    Attributes:
        observed: the runs.
        plans: names of the plans of all of them.
        plan_R: which of these each run has.
    """

    observed: Sequence[ObservedRun]
    plans: tuple[str, ...]
    plan_R: tuple[int, ...]

    def only(self, chosen: Sequence[int]) -> "Runs":
        """Some of them, with the same plans."""
        return Runs([self.observed[r] for r in chosen], self.plans,
                    tuple(self.plan_R[r] for r in chosen))  # fmt: skip

    @cached_property
    def ages(self) -> Ages:
        """Of all steps."""
        return Ages.of([run.lags for run in self.observed])

    @cached_property
    def _places(self) -> tuple[tuple[Floats, Floats, Floats], ...]:
        """Of mismatch, reward, held-out reward: steps, runs and values, [W] each."""
        kinds: tuple[list[tuple[int, int, float]], ...] = ([], [], [])
        for r, run in enumerate(self.observed):
            kinds[0].extend((s, r, value) for s, value in enumerate(run.mismatch))
            kinds[1].extend((s, r, value) for s, value in enumerate(run.reward))
            last = len(run.mismatch)
            kinds[2].extend((s, r, value) for s, value in run.held_out if s <= last)
        return tuple(_columns(kind) for kind in kinds)

    def measured(self) -> tuple[Floats, Floats, Floats]:
        """Values by kind, [W] each."""
        first, second, third = (values for *_, values in self._places)
        return first, second, third

    def steps(self) -> tuple[Floats, ...]:
        """The step of each value, by kind."""
        return tuple(step for step, *_ in self._places)

    def runs(self) -> tuple[Floats, ...]:
        """The run of each value, by kind."""
        return tuple(run.astype(int) for _, run, _ in self._places)

    def predicted(self, made: Trajectories) -> tuple[Floats, ...]:
        """What the model says of each, [C, W] by kind."""
        of_kind = (made.mismatch, made.sampled, made.reward)
        return tuple(
            values[:, step.astype(int), run.astype(int)]
            for values, (step, run, _) in zip(of_kind, self._places, strict=True)
        )


def _columns(rows: list[tuple[int, int, float]]) -> tuple[Floats, Floats, Floats]:
    array = np.array(rows, dtype=float).reshape(-1, 3)
    return array[:, 0], array[:, 1], array[:, 2]


def apart(said: Sequence[Floats], measured: Sequence[Floats]) -> list[Floats]:
    """Model less runs, by kind; mismatch by its square root."""
    mismatch = np.sqrt(np.maximum(said[0], 0.0)) - np.sqrt(measured[0])
    return [mismatch, said[1] - measured[1], said[2] - measured[2]]
