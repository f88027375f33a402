"""What a calibration is: constants, how sure they are, and where they hold.

It is plain numbers: `Calibration.to_json` writes them, `Calibration.from_json` reads and checks
them. The same `Learning` that the reference model has holds what was fitted, so that every other
model takes it as it is. Beside it stand ``settling`` and ``erosion``, which the post's model has
not: one who leaves them out has the mismatch of a policy that has not learned yet, which is the
largest, and the reward that it would tend to without mismatch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.calibrated import checks
from lightning_qrl.simulator.calibrated.checks import check_finite, check_limits
from lightning_qrl.simulator.constants import Learning

FORMAT = 1
PARTS = ("settling", "erosion", "drift")  # in the order in which they are tried


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found of one precision plan.

    Attributes:
        floor: typical mismatch at lag 0 before the first step, in nats, as the model has it: it is
            fitted by square roots, so the few steps in which a plan's mismatch is far above its
            usual one hardly move it.
        measured_floor: mean mismatch over all steps of its synchronous runs, such steps included.
        sampling_seconds: median over steps; None where runs did not tell.
        update_seconds: the same of forward, backward and optimizer.
        tokens: that a step is trained on, the same.

    Raises:
        ValueError: a number is impossible.
    """

    floor: float
    measured_floor: float | None = None
    sampling_seconds: float | None = None
    update_seconds: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        check_limits(self, checks.PLAN)

    @property
    def seconds_per_token(self) -> float | None:
        """That is sampled, with all completions of a step side by side; None: not known."""
        if self.sampling_seconds is None or self.tokens is None:
            return None
        return self.sampling_seconds / self.tokens


@dataclass(frozen=True, kw_only=True)
class Domain:
    """What the runs were: beyond it, a prediction is a guess.

    Attributes:
        runs: how many.
        settings: how many different ones, seeds apart.
        largest_lag: of any token, in versions.
        steps: of the longest run.
        batch: groups of a step, the fewest and the most.
        group_size: completions of a group.
        alike: settings that all runs shared.

    Raises:
        ValueError: a number is impossible.
    """

    runs: int
    settings: int
    largest_lag: float
    steps: int
    batch: tuple[int, int]
    group_size: int
    alike: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_limits(self, checks.DOMAIN)
        least, most = self.batch
        if not 1 <= least <= most <= checks.LARGEST:
            raise ValueError(f"batch is the fewest groups and the most, got {least} and {most}")


@dataclass(frozen=True, kw_only=True)
class Goodness:
    """Of one kind of numbers, on runs that were left out.

    Attributes:
        rmse: root of the mean squared error, in the unit of the numbers.
        rmse_of_mean: of the mean of the other runs.
        rmse_of_curve: of their mean at the same step.
        rmse_of_lag: of the mean at the same step of the others of the same lag; None where no
            other had it.
        r2: of the model against the mean; None, as those below, against a rival without error.
        r2_of_curve: of the model against the mean at the same step.
        r2_of_lag: of the model against that of the same lag, where there is one.
    """

    rmse: float
    rmse_of_mean: float
    rmse_of_curve: float
    rmse_of_lag: float | None
    r2: float | None
    r2_of_curve: float | None
    r2_of_lag: float | None


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
        intervals: 95%, of what was fitted, by name; floors as ``floor/PLAN``. None for an end that
            was not found within what the search may try.
        parts: of the model, by name: settling, erosion, drift; those that were taken earned it.
        goodness: on settings that were left out, by kind: mismatch, reward, held_out.
        goodness_of_lags: where all settings of a lag were left out, each lag but 0.
        reference: the same of the post's structure, with drift and without settling.
        guessed: the settings that were left out.
        domain: what the runs were.
        notes: what these runs do not say, in words.
        format: of the file.

    Raises:
        ValueError: a number is impossible, there is no plan, or a part has no verdict.
    """

    learning: Learning
    settling: float
    erosion: float
    erosion_power: float
    plans: Mapping[str, Plan]
    intervals: Mapping[str, tuple[float | None, float | None]]
    parts: Mapping[str, Part]
    goodness: Mapping[str, Goodness]
    goodness_of_lags: Mapping[str, Goodness]
    reference: Mapping[str, Goodness]
    guessed: tuple[Guessed, ...]
    domain: Domain
    notes: tuple[str, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        check_limits(self.learning, checks.LEARNING, "learning.")
        check_limits(self, checks.NEW)
        if not self.learning.reward_start < self.learning.reward_ceiling:
            raise ValueError("learning.reward_start must be below learning.reward_ceiling")
        if not self.plans:
            raise ValueError("plans is empty")
        if self.parts.keys() != set(PARTS):
            raise ValueError(f"parts must be {', '.join(PARTS)}, got {', '.join(self.parts)}")
        if self.goodness.keys() != self.reference.keys():
            raise ValueError("goodness and reference must be of the same kinds of numbers")
        check_finite(asdict(self))

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
            raise UserError(f"{where}: {_first(error.errors()[0])}; {anew}") from None
        if found.format != FORMAT:
            raise UserError(f"{where}: format {found.format}, and {FORMAT} is what is read; {anew}")
        if json.loads(text) != json.loads(found.to_json()):
            raise UserError(f"{where}: keys are missing or unknown; {anew}")
        return found


def _first(error: Mapping[str, Any]) -> str:
    """What pydantic says first, with the key."""
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":  # by the classes above, whose text begins with a name
        return f"{place}{'.' if place else ''}{error['ctx']['error']}"
    return f"{place or 'the file'}: {error['msg']}"
