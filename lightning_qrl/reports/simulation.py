"""A run of the reference model as text and as JSON: its settings and its outcome; two compared."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from lightning_qrl.reports.tables import text_table
from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import Summary, summarize
from lightning_qrl.simulator.trace import Trace

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
    "trainer busy": ("trainer_busy", "{:.1%}"),
    "samplers busy": ("samplers_busy", "{:.1%}"),
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
    lines["busy"] = f"trainer {summary.trainer_busy:.0%}, samplers {summary.samplers_busy:.0%}"
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
    values = asdict(settings).items()
    return " ".join(f"{key}={plain(value)}" for key, value in values if key not in without)


def plain(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def labelled(lines: Mapping[str, str], width: int) -> str:
    """Labels and texts, wrapped to a width."""
    room = max(24, width - LABEL)
    texts = (
        (f"{label:{LABEL}}" if not place else " " * LABEL) + part
        for label, text in lines.items()
        for place, part in enumerate(textwrap.wrap(text, room, break_on_hyphens=False))
    )
    return "".join(f"{text}\n" for text in texts)


def idle_settings(settings: Settings) -> list[str]:
    """Notes on settings that differ from their defaults and have no effect in this precision."""
    without = {
        "bf16": ("backward", "bf16_tail", "shared_experts", "four_over_six"),
        "fp8": ("four_over_six",),
        "fp4": (),
    }[settings.precision]
    defaults = {field.name: field.default for field in fields(Settings)}
    return [
        f"{name}={plain(getattr(settings, name))} has no effect in {settings.precision}"
        for name in without
        if getattr(settings, name) != defaults[name]
    ]


def trace_json(
    trace: Trace, constants: Constants = POST, *, notes: Sequence[str] = (), whole: bool = True
) -> dict[str, Any]:
    """A run as plain values.

    Args:
        trace: of the run.
        constants: those of the run.
        notes: on what the numbers hold for.
        whole: with every rollout, step and broadcast.
    """
    made: dict[str, Any] = {"settings": asdict(trace.settings), "notes": list(notes)}
    made["duration"] = trace.duration
    made |= summary_json(summarize(trace, constants))
    if whole:
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
        [field.name, plain(getattr(a, field.name)), plain(getattr(b, field.name))]
        for field in fields(Settings)
        if getattr(a, field.name) != getattr(b, field.name)
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
    step = summary.diverged_at_step
    return "no" if step is None else f"at step {step}"
