"""What a calibration is: constants, how sure they are, and where they hold.

It is plain numbers: `Calibration.to_json` writes them, `Calibration.from_json` reads and checks
them. The same `Learning` that the reference model has holds what was fitted, so that every other
model takes it as it is. Beside it stand ``settling`` and ``erosion``, which the post's model has
not: one who leaves them out has the mismatch of a policy that has not learned yet, which is the
largest, and the reward that it would tend to without mismatch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.constants import Learning

FORMAT = 1
SIGNED = ("reward_start", "reward_ceiling", "reward_least")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found of one precision plan.

    Attributes:
        floor: mismatch at lag 0 before the first step, in nats.
        sampling_seconds: median over steps; None where runs did not tell.
        update_seconds: the same of forward, backward and optimizer.
        seconds_per_token: that is sampled, with all completions of a step side by side.
    """

    floor: float
    sampling_seconds: float | None = None
    update_seconds: float | None = None
    seconds_per_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class Domain:
    """What the runs were: beyond it, a prediction is a guess.

    Attributes:
        runs: how many.
        settings: how many different ones, seeds apart.
        largest_lag: of any token, in versions.
        steps: of the longest run.
        batch: groups of a step, the fewest and the most.
        alike: settings that all runs shared.
    """

    runs: int
    settings: int
    largest_lag: float
    steps: int
    batch: tuple[int, int]
    alike: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Goodness:
    """Of one kind of numbers, on settings that were left out.

    Attributes:
        rmse: root of the mean squared error, in the unit of the numbers.
        rmse_of_mean: of the mean of the other runs.
        rmse_of_curve: of their mean at the same step.
        r2: of the model against the mean.
        r2_of_curve: of the model against the mean at the same step.
    """

    rmse: float
    rmse_of_mean: float
    rmse_of_curve: float
    r2: float
    r2_of_curve: float


@dataclass(frozen=True, kw_only=True)
class Guessed:
    """A setting that was left out, and what was predicted of it.

    Attributes:
        plan: of its runs.
        lag: versions behind, after the ramp.
        runs: how many it has.
        mismatch: mean over their steps.
        mismatch_predicted: the same of the model.
        reward: mean over their last steps.
        reward_predicted: the same of the model.
    """

    plan: str
    lag: float
    runs: int
    mismatch: float
    mismatch_predicted: float
    reward: float
    reward_predicted: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part that the model may have, judged on settings that were left out.

    Attributes:
        taken: whether it is in.
        fall: share of the held-out loss that goes with it.
        error: standard error of that, over settings.
    """

    taken: bool
    fall: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants of the model, found from runs.

    Attributes:
        learning: the model's constants. What was not fitted is the post's; where drift was not
            identified, its gain, feedback and cost are 0.
        settling: exponent with which mismatch falls as the policy learns; 0 in the post's model.
        erosion: share of all there is to learn that a unit of mismatch takes in a step from a
            policy that has learned it; 0 in the post's model.
        erosion_power: exponent with which that grows with what was learned.
        plans: by name.
        intervals: 95%, of what was fitted, by name; floors as ``floor/PLAN``.
        parts: of the model, by name: settling, erosion, drift; those that were taken earned it.
        goodness: on settings that were left out, by kind: mismatch, reward, held_out.
        reference: the same of the post's structure, with drift and without settling.
        guessed: the settings that were left out.
        domain: what the runs were.
        notes: what these runs do not say, in words.
        format: of the file.
    """

    learning: Learning
    settling: float
    erosion: float
    erosion_power: float
    plans: Mapping[str, Plan]
    intervals: Mapping[str, tuple[float, float]]
    parts: Mapping[str, Part]
    goodness: Mapping[str, Goodness]
    reference: Mapping[str, Goodness]
    guessed: tuple[Guessed, ...]
    domain: Domain
    notes: tuple[str, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name, value in vars(self.learning).items():
            if not math.isfinite(value) or (value < 0 and name not in SIGNED):
                raise ValueError(f"learning.{name} is a number of at least 0, got {value}")
        for name in ("half", "mismatch_limit"):
            if not getattr(self.learning, name):
                raise ValueError(f"learning.{name} is above 0, got 0")
        if not self.learning.reward_start < self.learning.reward_ceiling:
            raise ValueError("learning.reward_start is below learning.reward_ceiling")
        for name, plan in self.plans.items():
            if not 0 <= plan.floor < math.inf:
                raise ValueError(f"plans.{name}.floor is a number of at least 0, got {plan.floor}")

    def plan(self, name: str) -> Plan:
        """One plan.

        Raises:
            UserError: no run had it.
        """
        if name not in self.plans:
            known = ", ".join(self.plans)
            raise UserError(
                f"the calibration has no plan {name}, only {known}; take one of these, or "
                f"calibrate with runs of {name}"
            )
        return self.plans[name]

    def to_json(self) -> str:
        """As text, numbers to the last digit."""
        from pydantic import TypeAdapter

        text: str = TypeAdapter(Calibration).dump_json(self, indent=1).decode()
        return text + "\n"

    @staticmethod
    def from_json(text: str, where: str = "calibration") -> "Calibration":
        """Read and check.

        Args:
            text: what `to_json` wrote.
            where: its file, for the message.

        Raises:
            UserError: it is no calibration, or not of this format; one line.
        """
        from pydantic import TypeAdapter, ValidationError

        anew = "write it anew with qrl simulate --calibrate EXPERIMENT --save FILE"
        try:
            found = TypeAdapter(Calibration).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(f"{where}: {place}: {first['msg']}; {anew}") from None
        if found.format != FORMAT:
            raise UserError(f"{where}: format {found.format}, and {FORMAT} is what is read; {anew}")
        if json.loads(text) != json.loads(found.to_json()):
            raise UserError(f"{where}: keys are missing or unknown; {anew}")
        return found
