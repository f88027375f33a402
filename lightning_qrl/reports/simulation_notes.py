"""Notes under a run of the reference model: settings without effect, and a lag that is constant."""

from collections.abc import Collection, Iterator
from dataclasses import fields

from lightning_qrl.simulator.closed_forms import critical_effective, critical_staleness, plateau
from lightning_qrl.simulator.constants import Constants
from lightning_qrl.simulator.dynamics import mismatch
from lightning_qrl.simulator.settings import Settings, idle
from lightning_qrl.simulator.trace import Trace
from lightning_qrl.simulator.words import plain

DEFAULTS = {field.name: field.default for field in fields(Settings)}


def idle_notes(settings: Settings, axes: Collection[str] = ()) -> Iterator[str]:
    """Settings that were set, or are varied, and have no effect beside the others.

    Args:
        settings: of a run.
        axes: settings that vary from run to run.
    """
    shown = settings.shown()
    for key, reason in idle(settings).items():
        if key not in shown or (key not in axes and shown[key] == DEFAULTS[key]):
            continue
        what = key if key in axes else f"{key}={plain(shown[key])}"
        yield f"{what} has no effect with precision={settings.precision}: {reason}"


def lag_note(lag: float, trace: Trace, constants: Constants) -> str | None:
    """What a constant lag does, which the model's cap does not make; None where nothing is known.

    Args:
        lag: versions that every rollout is behind.
        trace: of the run whose cap is this lag.
        constants: those of the run.
    """
    learning = constants.learning
    if critical_effective(learning) == float("inf"):
        return None
    critical = critical_staleness(trace.floor, learning)
    rest = plateau(mismatch([lag], trace.floor, learning).effective, learning)
    does = "has no fixed point" if rest is None else f"would rest at {rest:.2f}"
    return (
        f"the model's cap of {lag:g} let the lag be {trace.mean_staleness:.1f} on average; at a "
        f"constant {lag:g} the drift {does} (critical lag {critical:.1f}), whatever this run did"
    )
