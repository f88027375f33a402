"""A calibration as text, for the terminal: constants, what they are worth, what they do not say."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_qrl.reports.tables import text_table
from lightning_qrl.simulator.calibrated.calibration import Calibration, Goodness, Plan
from lightning_qrl.simulator.calibrated.trajectories import NEW
from lightning_qrl.simulator.constants import POST

FITTED = {  # by name: what it is
    "staleness_scale": "mismatch one version behind",
    "staleness_power": "its exponent in the versions",
    "settling": "exponent with which it falls as the policy learns",
    "reward_start": "reward before the first step",
    "reward_ceiling": "reward that the policy tends to",
    "reward_rate": "share of the way in a step",
    "erosion": "what a unit of mismatch takes of all that was learned",
    "erosion_power": "its exponent in the share that was learned",
    "mismatch_limit": "mismatch at which progress stops",
    "gain": "drift by a unit of effective mismatch",
    "feedback": "the same by drift squared",
    "decay": "share of the drift that goes in a step",
    "drift_cost": "progress that a unit of drift takes",
}
KINDS = {
    "mismatch": "mismatch of a step",
    "reward": "reward of a step",
    "held_out": "held-out reward",
}
RIVALS = (
    "RMSE", "of the mean", "of the mean curve", "of the same lag", "R²", "R² by the curve",
    "R² by the same lag",
)  # fmt: skip


def calibration_text(calibration: Calibration) -> str:
    """Tables and notes, each line with its newline."""
    return "\n".join(_parts(calibration))


def _parts(calibration: Calibration) -> Iterator[str]:
    domain = calibration.domain
    least, most = domain.batch
    yield (
        f"{domain.runs} runs of {domain.settings} settings, up to {domain.steps} steps of "
        f"{least if least == most else f'{least} to {most}'} groups, up to "
        f"{domain.largest_lag:g} versions behind\n"
    )
    yield text_table(("constant", "value", "95% interval", "post", "what it is"),
                     list(_constants(calibration)), left=1)  # fmt: skip
    yield text_table(("plan", "floor", "95% interval", "at lag 0, mean", "sampling s", "update s",
                      "µs a token"),
                     [_plan_row(name, plan, calibration.intervals)
                      for name, plan in calibration.plans.items()])  # fmt: skip
    yield text_table(
        ("part of the model", "held-out loss falls by", "standard error", "taken"),
        [(name, f"{part.fall:.1%}", f"{part.error:.1%}", "yes" if part.taken else "no")
         for name, part in calibration.parts.items()],
    )  # fmt: skip
    yield _table_of_rivals(
        ("settings left out", *RIVALS, "RMSE of the post's structure"),
        [(*_goodness_row(name, found), f"{calibration.reference[name].rmse:.4f}")
         for name, found in calibration.goodness.items()],
    )  # fmt: skip
    if calibration.goodness_of_lags:
        yield _table_of_rivals(
            ("all settings of a lag left out", *RIVALS),
            [_goodness_row(name, found) for name, found in calibration.goodness_of_lags.items()],
        )
    yield text_table(
        ("setting left out", "lag", "runs", "mismatch", "predicted", "last rewards", "predicted"),
        [(g.plan, f"{g.lag:g}", f"{g.runs}", _small(g.mismatch), _small(g.mismatch_predicted),
          f"{g.reward:.3f}", f"{g.reward_predicted:.3f}")
         for g in sorted(calibration.guessed, key=lambda g: (g.plan, g.lag))],
    )  # fmt: skip
    yield "".join(f"note: {note}\n" for note in calibration.notes)


def _constants(calibration: Calibration) -> Iterator[tuple[str, ...]]:
    post = {**vars(POST.learning), **dict.fromkeys(NEW, 0.0)}
    own = {**vars(calibration.learning), **{name: getattr(calibration, name) for name in NEW}}
    for name, about in FITTED.items():
        if name in calibration.intervals:
            low, high = calibration.intervals[name]
            yield name, f"{own[name]:.4g}", _interval(low, high), f"{post[name]:g}", about


def _plan_row(
    name: str, plan: Plan, intervals: Mapping[str, tuple[float | None, float | None]]
) -> tuple[str, ...]:
    low, high = intervals[f"floor/{name}"]
    per_token = None if plan.seconds_per_token is None else 1e6 * plan.seconds_per_token
    times = (plan.sampling_seconds, plan.update_seconds, per_token)
    return (
        name, _small(plan.floor), _interval(low, high),
        "–" if plan.measured_floor is None else _small(plan.measured_floor),
        *("–" if value is None else f"{value:.3g}" for value in times),
    )  # fmt: skip


def _table_of_rivals(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Without columns of rivals that there are not."""
    there = [at for at in range(len(head)) if any(row[at] != "–" for row in rows)]
    return text_table([head[at] for at in there], [[row[at] for at in there] for row in rows])


def _goodness_row(name: str, found: Goodness) -> tuple[str, ...]:
    rmse = (found.rmse, found.rmse_of_mean, found.rmse_of_curve, found.rmse_of_lag)
    r2 = (found.r2, found.r2_of_curve, found.r2_of_lag)
    return (
        KINDS[name],
        *("–" if value is None else f"{value:.4f}" for value in rmse),
        *("–" if value is None else f"{value:.2f}" for value in r2),
    )


def _interval(low: float | None, high: float | None) -> str:
    """An end that was not found is not said; 0 alone says nothing."""
    if high is None:
        return f"> {_small(low)}" if low else "not found"
    return f"< {_small(high)}" if low is None else f"[{_small(low)}, {_small(high)}]"


def _small(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
