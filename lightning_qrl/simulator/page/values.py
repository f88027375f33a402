"""What the page gets from Python, as plain values that JSON can carry.

The model's numbers, the settings' names, choices and limits, which have no effect beside others,
and the outcome of every preset: the page holds none of them a second time, so it cannot disagree
with Python about one.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.page.controls import LARGEST, REACH
from lightning_qrl.simulator.reference import DUE, TOO_OLD, simulate
from lightning_qrl.simulator.settings import IDLE, LIMITS, PRESETS, Settings
from lightning_qrl.simulator.summary import summarize

PLAN = ("precision", "backward", "bf16_tail", "shared_experts", "four_over_six")
OUTCOME = ("optimizer_steps", "final_reward", "final_drift", "diverged_at_step", "mean_staleness",
           "quantization_floor", "discarded")  # fmt: skip


def plain(value: Any) -> Any:
    """A value of dataclasses, mappings and tuples as dicts and lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}


def model_constants(constants: Constants) -> dict[str, Any]:
    """What ``simulate`` of ``model.js`` takes as its constants."""
    return {**plain(constants), "due": DUE, "too_old": TOO_OLD}


def specs(settings: Settings) -> list[dict[str, Any]]:
    """Each setting's name and what it may be on a page that starts with these settings."""
    kinds = get_type_hints(Settings)
    return [_spec(item.name, kinds[item.name], getattr(settings, item.name))
            for item in fields(Settings)]  # fmt: skip


def _spec(key: str, kind: Any, start: Any) -> dict[str, Any]:
    if choices := get_args(kind):
        return {"key": key, "choices": list(choices)}
    if kind is bool:
        return {"key": key, "choices": [False, True]}
    return {"key": key, "least": LIMITS[key][0], "most": max(REACH[key], start)}


def preset_settings(name: str, settings: Settings) -> Settings:
    """The precision of a preset in the system of some settings."""
    preset = Settings(**PRESETS[name])
    return replace(settings, **{key: getattr(preset, key) for key in PLAN})


def check_fits(settings: Settings) -> None:
    """Refuse what the page can neither draw nor run at once.

    Raises:
        UserError: a setting is larger than on any page.
    """
    for key, most in LARGEST.items():
        if (value := getattr(settings, key)) > most:
            raise UserError(f"{key} goes to {most} on a page, got {value}: take less, or run it in "
                            "the terminal, without a page")  # fmt: skip


def page_values(settings: Settings) -> dict[str, Any]:
    """All that the page's scripts take from Python, with the post's constants.

    Returns:
        ``start`` and ``defaults``: settings; ``constants``; ``specs``; ``outcome``: names of the
        numbers of an outcome; ``idle``: why settings have no effect, by precision; ``presets``: by
        name, settings and what Python makes of them.
    """
    presets = {}
    for name in PRESETS:
        trace = simulate(preset_settings(name, settings))
        summary = summarize(trace)
        presets[name] = {
            "settings": plain(trace.settings),
            "outcome": {key: getattr(summary, key) for key in OUTCOME},
        }
    return {
        "start": plain(settings),
        "defaults": plain(Settings()),
        "constants": model_constants(POST),
        "specs": specs(settings),
        "plan": list(PLAN),
        "outcome": list(OUTCOME),
        "idle": plain(IDLE),
        "presets": presets,
    }
