"""A run of the reference model as text and as JSON: its settings and its outcome; two compared."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_qrl.reports.tables import text_table
from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import Summary, summarize
from lightning_qrl.simulator.trace import Trace
from lightning_qrl.simulator.words import plain

LABEL = 12
NO_LIMIT = "no limit of stability follows from these constants: drift feeds on nothing"
NUMBERS = {  # of a comparison: label, field of Summary, form
    "steps": ("optimizer_steps", "{:.0f}"),
    "reward": ("final_reward", "{:.3f}"),
    "drift": ("final_drift", "{:.2f}"),
    "mismatch": ("mean_mismatch", "{:.4f}"),
    "effective": ("mean_effective", "{:.4f}"),
    "floor": ("quantization_floor", "{:.4f}"),
    "staleness": ("mean_staleness", "{:.2f}"),
    "rollouts": ("rollouts", "{:.0f}"),
    "discarded": ("discarded", "{:.0f}"),
    "trainer busy": ("trainer_utilization", "{:.1%}"),
    "samplers busy": ("sampler_utilization", "{:.1%}"),
}


def outcome_text(trace: Trace, width: int, constants: Constants = POST) -> str:
    """What came of a run, a line or more for each of its sides.

    Args:
        trace: of the run.
        width: of the terminal.
        constants: those of the run.
    """
    summary = summarize(trace, constants)
    lines = {"settings": settings_text(trace.settings)}
    if summary.why_no_step is not None:
        lines["steps"] = summary.why_no_step
    else:
        lines |= _of_training(trace, summary, constants)
    lines["rollouts"] = (
        f"{summary.rollouts} begun: {summary.consumed} trained on, {summary.discarded} discarded, "
        f"{summary.queued} left in the queue, {summary.running} unfinished"
    )
    lines["busy"] = (
        f"trainer {summary.trainer_utilization:.0%}, samplers {summary.sampler_utilization:.0%}"
    )
    return labelled(lines, width)


def _of_training(trace: Trace, summary: Summary, constants: Constants) -> dict[str, str]:
    learning = constants.learning
    ended = ""
    if trace.diverged_at_step is not None:
        step, time = summary.diverged_at_step, summary.diverged_at_time
        ended = f"; DIVERGED at step {step} (counted from 0), at time {time:.1f}"
    elif says_stability(summary):
        ended = "; did not diverge"
    of_staleness = summary.mean_mismatch - summary.quantization_floor
    ages = ", ".join(f"{count} of {age}" for age, count in summary.staleness.items())
    return {
        "steps": f"{summary.optimizer_steps} in {trace.duration:.0f} units of time{ended}",
        "reward": f"{learning.reward_start:.3f} -> {summary.final_reward:.3f}",
        "drift": _drift(trace, summary, constants),
        "mismatch": (
            f"mean {summary.mean_mismatch:.4f}: quantization {summary.quantization_floor:.4f}, "
            f"staleness {of_staleness:.4f}"
        ),
        "staleness": f"mean {summary.mean_staleness:.2f} versions: {ages}",
    }


def says_stability(summary: Summary) -> bool:
    """Whether the constants have a limit of stability: those of some calibrations have none."""
    return math.isfinite(summary.critical_effective)


def _drift(trace: Trace, summary: Summary, constants: Constants) -> str:
    if not says_stability(summary):
        return NO_LIMIT
    kicks = sum(step.kick > 0 for step in trace.steps)
    kicked = f" after {kicks} kicks" if kicks else ""
    drift = f"{summary.final_drift:.2f}{kicked}, diverged above {constants.learning.divergence:g}"
    rest = summary.drift_plateau
    if rest is None:
        return f"{drift}; no fixed point: the mean effective mismatch is {_critical(summary)}"
    return f"{drift}; fixed point {rest:.2f} at the mean effective mismatch, {_critical(summary)}"


def _critical(summary: Summary) -> str:
    return f"{summary.mean_effective:.4f} of the critical {summary.critical_effective:.4f}"


def settings_text(settings: Settings, without: Collection[str] = ()) -> str:
    """All that is set, as it would be given."""
    values = settings.shown().items()
    return " ".join(f"{key}={plain(value)}" for key, value in values if key not in without)


def labelled(lines: Mapping[str, str], width: int) -> str:
    """Labels and texts, wrapped to a width."""
    room = max(24, width - LABEL)
    texts = (
        (f"{label:{LABEL}}" if not place else " " * LABEL) + part
        for label, text in lines.items()
        for place, part in enumerate(textwrap.wrap(text, room, break_on_hyphens=False))
    )
    return "".join(f"{text}\n" for text in texts)


def trace_json(
    trace: Trace, constants: Constants = POST, *, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """A run as plain values, with every rollout, step and broadcast.

    Args:
        trace: of the run.
        constants: those of the run.
        notes: on what the numbers hold for.
    """
    made: dict[str, Any] = {"settings": trace.settings.shown(), "notes": list(notes)}
    made["duration"] = trace.duration
    made |= summary_json(summarize(trace, constants))
    for name in ("rollouts", "steps", "broadcasts"):
        made[f"all_{name}"] = [asdict(part) for part in getattr(trace, name)]
    return made


def summary_json(summary: Summary) -> dict[str, Any]:
    """A summary as plain values; no critical mismatch is null."""
    made = asdict(summary)
    if math.isinf(summary.critical_effective):
        made["critical_effective"] = None
    return made


def differences_text(a: Settings, b: Settings) -> str:
    """A table of the settings in which two runs differ."""
    rows = [
        [name, plain(value), plain(other)]
        for (name, value), other in zip(a.shown().items(), b.shown().values(), strict=True)
        if value != other
    ]
    return text_table(["settings", "A", "B"], rows) if rows else "settings  A and B are the same\n"


def comparison_text(a: Summary, b: Summary) -> str:
    """A table of two outcomes and how they differ."""
    rows = [
        [label, *_pair(form, getattr(a, name), getattr(b, name))]
        for label, (name, form) in NUMBERS.items()
    ]
    ends = [_ended(a), _ended(b), ""]
    return text_table(["outcome", "A", "B", "B - A"], [*rows, ["diverged", *ends]])


def _pair(form: str, a: float, b: float) -> tuple[str, str, str]:
    return form.format(a), form.format(b), form.replace("{:", "{:+", 1).format(b - a)


def _ended(summary: Summary) -> str:
    if summary.why_no_step is not None:
        return "no step"
    if not says_stability(summary):
        return "not known"
    step = summary.diverged_at_step
    return "no" if step is None else f"at step {step}"
