"""Recorded runs as a calibration needs them, and a calibration as text.

A precision plan is told by the callbacks of its recipe, less those that only watch. All other
settings but the seed, the length and the staleness must be alike in the runs of a calibration.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from lightning_qrl.errors import UserError
from lightning_qrl.reports.calibration_text import calibration_text
from lightning_qrl.simulator.calibrated.observed import Lags, ObservedRun
from lightning_qrl.tracking import tags
from lightning_qrl.tracking.notebook import RecordedRun

__all__ = ["METRICS", "calibration_text", "observed"]

MISMATCH = "train/sampling/sampling_logp_difference/mean"
REWARD, HELD_OUT = "train/reward", "eval/reward"
STALENESS, DISCARDED = "async/staleness_mean", "async/discarded"
SAMPLING, UPDATE, TOKENS = "timing_s/gen", "timing_s/update_actor", "train/num_tokens"
BUCKETS: Mapping[str, tuple[int, int]] = MappingProxyType(  # first and last lag of each
    {f"async/staleness/lag_{lag}": (lag, lag) for lag in range(8)}
    | {f"async/staleness/lag_{2**k}_{2 ** (k + 1) - 1}": (2**k, 2 ** (k + 1) - 1)
       for k in range(3, 11)}
)  # fmt: skip
NEEDED = (MISMATCH, REWARD, STALENESS)
METRICS = (*NEEDED, HELD_OUT, DISCARDED, SAMPLING, UPDATE, TOKENS, *BUCKETS)

WATCHERS = frozenset({
    "checkpoint", "gradient_noise_scale", "held_out_evaluation", "live_view", "nonfinite_guard",
    "quantization_monitor", "sampled_completions", "update_size",
})  # fmt: skip
FREE = frozenset({
    "seed", "trainer.max_steps", "trainer.accelerator", "trainer.devices", "rollout.max_staleness",
    "rollout.queue_depth", "rollout.weight_sync_every", "rollout.in_flight_update",
    "rollout.samplers", "rollout.completion_time", "rollout.completion_time_spread",
})  # fmt: skip
GROUPS, GROUP_SIZE = "grpo.prompts_per_rollout", "grpo.group_size"


def observed(run: RecordedRun) -> ObservedRun:
    """A recorded run, as far as its numbers are finite.

    Args:
        run: read with `METRICS`.

    Raises:
        UserError: it lacks a metric, or is too short.
    """
    for name in NEEDED:
        if name not in run.metrics:
            raise UserError(
                f"run {run.name} has no metric {name}, without which nothing can be calibrated; "
                "leave it out"
            )
    series = {name: run.metrics[name].values for name in NEEDED}
    steps = min(map(len, series.values()))
    finite = np.isfinite([values[:steps] for values in series.values()]).all(axis=0)
    steps = steps if finite.all() else int(np.argmin(finite))
    plan, alike = _settings(run.params)
    return ObservedRun(
        name=run.name,
        recipe=run.tags.get(tags.RECIPE, "unknown"),
        plan_text=plan,
        alike=alike,
        setting=run.tags.get(tags.RECIPE_HASH, run.name),
        seed=int(run.tags.get(tags.SEED, 0)),
        lags=tuple(_lags(run, step) for step in range(steps)),
        mismatch=tuple(series[MISMATCH][:steps].tolist()),
        reward=tuple(series[REWARD][:steps].tolist()),
        held_out=_held_out(run, steps),
        sampling_seconds=_values(run, SAMPLING),
        update_seconds=_values(run, UPDATE),
        tokens=tuple(np.diff(_values(run, TOKENS), prepend=0.0).tolist()),
        discarded=float(np.sum(_values(run, DISCARDED))),
        batch=int(run.params.get(GROUPS, 1)),
        group_size=int(run.params.get(GROUP_SIZE, 1)),
    )


def _values(run: RecordedRun, metric: str) -> tuple[float, ...]:
    return tuple(run.metrics[metric].values.tolist()) if metric in run.metrics else ()


def _held_out(run: RecordedRun, steps: int) -> tuple[tuple[int, float], ...]:
    if HELD_OUT not in run.metrics:
        return ()
    pairs = zip(*(part.tolist() for part in run.metrics[HELD_OUT]), strict=True)
    return tuple((step, reward) for step, reward in pairs if step <= steps and np.isfinite(reward))


def _lags(run: RecordedRun, step: int) -> Lags:
    """How old the tokens of a step were.

    A bucket of several lags is taken to be at one place in all such buckets, that at which the mean
    comes out: exact where a step has one such bucket with one lag in it.
    """
    found = []
    for name, (first, last) in BUCKETS.items():
        values = run.metrics[name].values if name in run.metrics else ()
        share = float(values[step]) if step < len(values) else 0.0
        if share > 0:
            found.append((first, last, share))
    total = sum(share for *_, share in found)
    if abs(total - 1) > 1e-3:
        raise UserError(
            f"run {run.name} does not say how old the tokens of step {step + 1} were: its metrics "
            f"async/staleness/lag_K add up to {total:g}; leave it out"
        )
    mean = float(run.metrics[STALENESS].values[step])
    width = sum(share * (last - first) for first, last, share in found)
    least = sum(share * first for first, _, share in found)
    place = min(max((mean - least) / width, 0.0), 1.0) if width else 0.0
    return tuple((first + place * (last - first), share / total) for first, last, share in found)


def _settings(params: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    """The plan, and what must be alike."""
    plan, alike = [], {}
    for key, value in sorted(params.items()):
        section, _, rest = key.partition(".")
        if section == "callbacks":
            if rest.partition(".")[0] not in WATCHERS:
                plan.append(f"{key}={value}")
        elif section != "tracking" and key not in FREE:
            alike[key] = value
    return "\n".join(plan), MappingProxyType(alike)
