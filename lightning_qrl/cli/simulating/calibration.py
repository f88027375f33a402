"""`qrl simulate` with constants that were fitted to runs: fitting them, and using them."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning_qrl.cli.simulating.showing import waiting
from lightning_qrl.errors import UserError
from lightning_qrl.simulator.constants import POST, Constants, Floors, Kick
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import Summary, summarize
from lightning_qrl.simulator.trace import Trace

if TYPE_CHECKING:
    from lightning_qrl.simulator.calibrated import Calibration

NO_KICK = Kick(size=0.0, probability=0.0)


def fit(experiments: Sequence[str], save: Path | None, *, as_json: bool) -> None:
    """Fit the model to finished runs in MLflow, print what came of it, and write it to a file."""
    from lightning_qrl.reports.calibration import METRICS, calibration_text, observed
    from lightning_qrl.simulator.calibrated import calibrate
    from lightning_qrl.tracking.client import tracking_uri
    from lightning_qrl.tracking.notebook import select_runs

    recorded = select_runs(tracking_uri(None), experiments).read(METRICS)
    finished = [run for run in recorded if run.status == "FINISHED"]
    if left := len(recorded) - len(finished):
        print(f"left out: {left} of {len(recorded)} runs, which are not finished", file=sys.stderr)
    runs = [observed(run) for run in finished]
    with waiting(f"fitting {len(runs)} runs"):
        calibration = calibrate(runs)
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
    calibration.plan(str(name))
    return str(name)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The reference model's clock with what a calibration says of mismatch, drift and reward.

    Times stay the post's, in its own unit. There are no kicks and no noise: none were fitted.

    Attributes:
        calibration: the constants.
        plan: the precision plan whose floor it is.
    """

    calibration: "Calibration"
    plan: str

    @property
    def constants(self) -> Constants:
        """Those of the post, with what was fitted, and one floor whatever the settings."""
        floor = self.calibration.plan(self.plan).floor
        floors = Floors(
            precision=MappingProxyType(dict.fromkeys(POST.floors.precision, floor)),
            four_over_six=floor,
            no_tail=1.0,
            tail=1.0,
            shared_experts=1.0,
            plain_fp4=0.0,
        )
        return replace(
            POST, learning=self.calibration.learning, floors=floors, high_precision_kick=NO_KICK,
            plain_kick=NO_KICK,
        )  # fmt: skip

    def simulate(self, settings: Settings) -> tuple[Trace, tuple[str, ...]]:
        """A run, and why not to trust what is predicted of it.

        Its steps' ``dynamic`` and ``effective`` are those of a policy that has not learned yet.
        """
        from lightning_qrl.simulator.calibrated import predict

        trace, notes = simulate(settings, self.constants), self.calibration.notes
        if not trace.steps:
            return trace, notes
        found = predict(self.calibration, self.plan, [s.ages for s in trace.steps], settings.batch)
        of_drift = self.calibration.learning.drift_in_mismatch
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
        return summarize(trace, self.constants), notes

    def notes_on_page(self) -> Iterator[str]:
        """What a model that takes the constants alone leaves out."""
        yield from self.calibration.notes
        for name in ("settling", "erosion"):
            if value := getattr(self.calibration, name):
                yield f"the page's model has no {name}; the calibration's is {value:.3g}"
