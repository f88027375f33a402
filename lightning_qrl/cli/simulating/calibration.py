"""`qrl simulate` with constants that were fitted to runs: fitting them, and using them."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning_qrl.cli.simulating.showing import waiting
from lightning_qrl.errors import UserError
from lightning_qrl.simulator.calibrated.settings import PlanSettings
from lightning_qrl.simulator.constants import POST, Constants, Floors, Kick, Times
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import Summary, summarize
from lightning_qrl.simulator.trace import Trace
from lightning_qrl.simulator.words import plain

if TYPE_CHECKING:
    from lightning_qrl.simulator.calibrated import Calibration

NO_KICK = Kick(size=0.0, probability=0.0)
UNIT = "bf16"  # the plan whose times are the unit, as in the post's model
TIMES = MappingProxyType({"sampling_seconds": "rollouts", "update_seconds": "steps"})


def fit(experiments: Sequence[str], save: Path | None, *, as_json: bool) -> None:
    """Fit the model to finished runs in MLflow, print what came of it, and write it to a file.

    Raises:
        UserError: there are no runs, or too few that can be used.
    """
    from lightning_qrl.reports.calibration import METRICS, calibration_text, observed
    from lightning_qrl.simulator.calibrated import calibrate
    from lightning_qrl.tracking.client import tracking_uri
    from lightning_qrl.tracking.notebook import select_runs

    recorded = select_runs(tracking_uri(None), experiments).read(METRICS)
    finished = [run for run in recorded if run.status == "FINISHED"]
    left = len(recorded) - len(finished)
    out = f"left out: {left} of {len(recorded)} runs, which are not finished" if left else ""
    try:
        runs = [observed(run) for run in finished]
        with waiting(f"fitting {len(runs)} runs"):
            calibration = calibrate(runs)
    except UserError as error:
        raise UserError(f"{error}; {out}" if out else str(error)) from None
    if out:
        print(out, file=sys.stderr)
    print(calibration.to_json() if as_json else calibration_text(calibration), end="")
    if save is not None:
        write(save, calibration.to_json())
        if not as_json:
            print(f"calibration  {save}")


def write(file: Path, text: str) -> None:
    """Write a file."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None


def read_calibration(file: Path) -> "Calibration":
    """Read a calibration.

    Raises:
        UserError: there is none in the file.
    """
    from lightning_qrl.simulator.calibrated import Calibration

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"--calibration {file} cannot be read: {reason}") from None
    return Calibration.from_json(text, f"--calibration {file}")


def plan_of(calibration: "Calibration", name: Any) -> str:
    """The plan that is asked for.

    Raises:
        UserError: none is, or there is no such plan.
    """
    if name is None:
        known = ", ".join(calibration.plans)
        raise UserError(f"--calibration: give plan=NAME, one of {known}")
    calibration.plan(plain(name))
    return plain(name)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The reference model's clock with what a calibration says of mismatch, drift and reward.

    The unit of time is the post's, its BF16; a plan's times are to it as the medians of its runs
    are to those of the plan ``bf16``. There are no kicks and no noise: none were fitted.

    Attributes:
        calibration: the constants.
    """

    calibration: "Calibration"

    def settings(self, **values: Any) -> PlanSettings:
        """Settings of a run, ``plan`` among them.

        Raises:
            UserError: there is no such plan.
            ValueError: another value is impossible.
        """
        return PlanSettings(**{**values, "plan": plan_of(self.calibration, values.get("plan"))})

    def constants(self, plan: str) -> Constants:
        """Those of the post, with what was fitted, and one floor whatever the settings."""
        floor = self.calibration.plan(plan).floor
        floors = Floors(
            precision=MappingProxyType(dict.fromkeys(POST.floors.precision, floor)),
            four_over_six=floor,
            no_tail=1.0,
            tail=1.0,
            shared_experts=1.0,
            plain_fp4=0.0,
        )
        return replace(
            POST, times=_times(self.calibration, plan), learning=self.calibration.learning,
            floors=floors, high_precision_kick=NO_KICK, plain_kick=NO_KICK,
        )  # fmt: skip

    def simulate(self, settings: Settings) -> tuple[Trace, tuple[str, ...]]:
        """A run, and why not to trust what is predicted of it.

        Its steps' ``dynamic`` and ``effective`` are those of a policy that has not learned yet.
        """
        from lightning_qrl.simulator.calibrated import predict

        plan, calibration = _plan(settings), self.calibration
        trace = simulate(settings, self.constants(plan))
        notes = (*calibration.notes, *_notes_on_times(calibration, plan, settings))
        if not trace.steps:
            return trace, notes
        found = predict(calibration, plan, [step.ages for step in trace.steps], settings.batch)
        of_drift = calibration.learning.drift_in_mismatch
        steps = tuple(
            replace(
                step, mismatch=shown - of_drift * drift, shown=shown, drift=drift, reward=reward
            )
            for step, shown, drift, reward in zip(
                trace.steps, found.mismatch, found.drift, found.reward, strict=True
            )
        )
        made = replace(
            trace, steps=steps, diverged_at_step=found.diverged_at_step,
            final_reward=found.reward[-1], final_drift=found.drift[-1],
        )  # fmt: skip
        return made, tuple(dict.fromkeys((*notes, *found.notes)))

    def outcome(self, settings: Settings) -> tuple[Summary, tuple[str, ...]]:
        """What comes of a run, and why not to trust it."""
        trace, notes = self.simulate(settings)
        return summarize(trace, self.constants(_plan(settings))), notes


def _plan(settings: Settings) -> str:
    assert isinstance(settings, PlanSettings), "settings are not those of `Fitted.settings`"
    return settings.plan


def _times(calibration: "Calibration", plan: str) -> Times:
    sampling, update = (_ratio(calibration, plan, name) or 1.0 for name in TIMES)
    step = MappingProxyType(dict.fromkeys(POST.times.step_factor[UNIT], update))
    return replace(
        POST.times,
        rollout_factor=MappingProxyType({UNIT: sampling}),
        step_factor=MappingProxyType({UNIT: step}),
    )


def _ratio(calibration: "Calibration", plan: str, name: str) -> float | None:
    """A plan's seconds over those of the plan that is the unit; None: not known."""
    plans = calibration.plans
    own, unit = getattr(plans[plan], name), getattr(plans.get(UNIT), name, None)
    return None if own is None or unit is None else float(own / unit)


def _notes_on_times(calibration: "Calibration", plan: str, settings: Settings) -> Iterator[str]:
    if plan == UNIT:
        return
    ratios = {what: _ratio(calibration, plan, name) for name, what in TIMES.items()}
    if known := [f"{what} {ratio:.2f}" for what, ratio in ratios.items() if ratio is not None]:
        yield f"times of {plan} over those of {UNIT}, as in the runs: {', '.join(known)}"
    if unknown := [what for what, ratio in ratios.items() if ratio is None]:
        yield (
            f"{' and '.join(unknown)} take the post's BF16 times: the calibration does not have "
            f"those of both {plan} and {UNIT}"
        )
    if settings.weight_sync:
        yield f"a broadcast takes the post's BF16 time, whatever {plan} sends"
