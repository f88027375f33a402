"""From runs to a calibration: check, fit, judge on what was left out, put intervals on it.

A run that diverges counts up to where it does, see `divergence`.

The model begins without drift, and settling, erosion (see `trajectories`) and drift are tried one
after the other. A part that does not lower the error on settings that were left out by more than
chance is not taken. Drift must besides be drift: a gain whose interval is above 0, and a decay
whose interval is below 1, so that it adds up from step to step. Where it is not, a note says so,
and no limit of stability can be predicted. That is the answer for runs none of which came near to
diverging.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightning_qrl.errors import UserError
from lightning_qrl.simulator.calibrated.calibration import PARTS, Calibration, Domain, Part, Plan
from lightning_qrl.simulator.calibrated.divergence import before_divergence
from lightning_qrl.simulator.calibrated.fit import Fit, fit
from lightning_qrl.simulator.calibrated.goodness import LeftOut, judged, leave_out, leave_out_lags
from lightning_qrl.simulator.calibrated.intervals import Interval, intervals
from lightning_qrl.simulator.calibrated.observed import ObservedRun
from lightning_qrl.simulator.calibrated.runs import Runs
from lightning_qrl.simulator.calibrated.structure import LEAST_LIMIT, Structure

LEAST_RUNS, LEAST_LAGS = 6, 3
FEW_SEEDS = 5
SAME = 1e-9  # relative: numbers that are apart by no more are one
MEMORY = 0.95  # a drift that loses so much in a step has none: it is a cost of the step


def calibrate(runs: Sequence[ObservedRun]) -> Calibration:
    """Find the model's constants.

    Args:
        runs: at least `LEAST_RUNS`, with `LEAST_LAGS` different lags, of each plan a synchronous
            one, alike in all but plan, lags, steps and seed.

    Raises:
        UserError: there are too few, they differ in more than that, one diverges at once, or all
            are the same number; the message says what is missing and how to make it.
    """
    _check(runs)
    sound = [before_divergence(run) for run in runs]
    prepared = prepare(sound)
    plain = fit(prepared, Structure())

    def tried(structure: Structure, start: Fit) -> tuple[Fit, LeftOut]:
        found = fit(prepared, structure, start=start)
        return found, leave_out(prepared, found, plain.noise)

    first = best = tried(Structure(), plain)
    parts = {}
    sure: Mapping[str, Interval] = {}
    for name in PARTS:
        more = tried(replace(best[0].structure, **{name: True}), best[0])
        part = judged(best[1], more[1])
        if part.taken and name == "drift":
            sure = intervals(prepared, more[0])
            lost = sure["decay"][1]
            part = replace(part, taken=bool(sure["gain"][0]) and lost is not None and lost < MEMORY)
        parts[name] = part
        best = more if part.taken else best
    if not parts["drift"].taken:
        sure = intervals(prepared, best[0])
    reference = tried(Structure(drift=True), first[0])[1]
    made = _calibration(prepared, *best, reference, sure, parts)
    return replace(made, notes=(*made.notes, *_on_seeds(runs), *_on_divergence(runs, sound)))


def _calibration(
    runs: Runs,
    found: Fit,
    held: LeftOut,
    reference: LeftOut,
    sure: Mapping[str, Interval],
    parts: Mapping[str, Part],
) -> Calibration:
    floors = found.floors(runs.plans)
    of_plan = {
        plan: [run for run, at in zip(runs.observed, runs.plan_R, strict=True)
               if runs.plans[at] == plan]
        for plan in runs.plans
    }  # fmt: skip
    return Calibration(
        learning=found.learning,
        settling=found.new["settling"],
        erosion=found.new["erosion"],
        erosion_power=found.new["erosion_power"],
        plans={plan: _plan(floors[plan], own) for plan, own in of_plan.items()},
        intervals=sure,
        parts=parts,
        goodness=held.goodness,
        goodness_of_lags=leave_out_lags(runs, found),
        reference=reference.goodness,
        guessed=tuple(held.guessed.values()),
        domain=_domain(runs.observed),
        notes=tuple(_notes(parts["drift"], sure)),
    )


def _plan(floor: float, runs: Sequence[ObservedRun]) -> Plan:
    sampling, update, tokens = (
        _median(getattr(run, name) for run in runs)
        for name in ("sampling_seconds", "update_seconds", "tokens")
    )
    synchronous = [run.mismatch for run in runs if run.synchronous]
    return Plan(
        floor=floor,
        measured_floor=float(np.mean(np.concatenate(synchronous))),
        sampling_seconds=sampling,
        update_seconds=update,
        tokens=tokens,
    )


def _median(series: Iterable[Sequence[float]]) -> float | None:
    """Of what was measured: a clock that did not run says nothing."""
    values = [value for one in series for value in one if math.isfinite(value) and value > 0]
    return float(np.median(values)) if values else None


def _domain(runs: Sequence[ObservedRun]) -> Domain:
    batches = [run.batch for run in runs]
    return Domain(
        runs=len(runs),
        settings=len({run.setting for run in runs}),
        largest_lag=max(run.largest_lag for run in runs),
        steps=max(len(run.mismatch) for run in runs),
        batch=(min(batches), max(batches)),
        group_size=runs[0].group_size,
        alike=dict(runs[0].alike),
    )


def _notes(drift: Part, sure: Mapping[str, Interval]) -> Iterable[str]:
    if not drift.taken:
        yield (
            f"drift: not identified (with it, the held-out loss falls by {drift.fall:.1%}, "
            f"standard error {drift.error:.1%}): no limit of stability can be predicted from these "
            "runs"
        )
    elif not sure["feedback"][0] or not sure["decay"][0]:
        yield "drift: its feedback or its decay may be 0, so its limit of stability is not known"
    largest = sure["mismatch_limit"][1]
    if largest is None or largest > 0.5 * LEAST_LIMIT**-0.5:
        yield "mismatch_limit: no loss of progress by mismatch was seen; it may as well not exist"


def _on_seeds(runs: Sequence[ObservedRun]) -> Iterable[str]:
    seeds = len({run.seed for run in runs})
    if seeds == len(runs):
        return
    if seeds == 1:
        few = "; no interval covers another seed"
    else:
        few = f"; the intervals rest on so few as {seeds}" if seeds < FEW_SEEDS else ""
    yield (
        f"seeds: {len(runs)} runs share {seeds}, and runs of one seed see the same prompts, so "
        "their noise is shared: the verdicts on the parts, which take settings as independent, are "
        f"surer than they should be{few}"
    )


def _on_divergence(runs: Sequence[ObservedRun], sound: Sequence[ObservedRun]) -> Iterable[str]:
    cut = [
        f"{run.name} after step {len(kept.reward)}"
        for run, kept in zip(runs, sound, strict=True)
        if kept is not run
    ]
    if cut:
        yield f"diverged, and left out from there on: {', '.join(cut)}"


def prepare(runs: Sequence[ObservedRun]) -> Runs:
    """Name the plans: as their recipe, and where two are called the same, with a digest."""
    texts: dict[str, set[str]] = {}
    for run in runs:
        texts.setdefault(run.recipe, set()).add(run.plan_text)
    names = [
        run.recipe if len(texts[run.recipe]) == 1 else f"{run.recipe}-{_digest(run.plan_text)}"
        for run in runs
    ]
    plans = tuple(dict.fromkeys(names))
    return Runs(list(runs), plans, tuple(plans.index(name) for name in names))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _check(runs: Sequence[ObservedRun]) -> None:
    make = (
        "make more, such as qrl fit --recipe RECIPE rollout.max_staleness=N seed=S "
        "tracking.experiment=EXPERIMENT with N = 0, 2, 8 and S = 0, 1"
    )
    if len(runs) < LEAST_RUNS:
        raise UserError(f"a calibration needs at least {LEAST_RUNS} runs, and has {len(runs)}; "
                        f"{make}")  # fmt: skip
    lags = sorted({round(run.usual_lag, 1) for run in runs})
    if len(lags) < LEAST_LAGS:
        there = ", ".join(f"{lag:g}" for lag in lags)
        raise UserError(f"a calibration needs runs with at least {LEAST_LAGS} different lags, and "
                        f"has {there}; {make}")  # fmt: skip
    prepared = prepare(runs)
    bare = set(prepared.plan_R) - {
        at for at, run in zip(prepared.plan_R, runs, strict=True) if run.synchronous
    }
    if bare:
        missing = ", ".join(prepared.plans[at] for at in sorted(bare))
        raise UserError(
            f"a calibration needs a synchronous run of each plan, and has none of {missing}; make "
            "one: qrl fit --recipe RECIPE rollout.max_staleness=0 tracking.experiment=EXPERIMENT"
        )
    _check_alike(runs)
    _check_varied(runs)


def _check_varied(runs: Sequence[ObservedRun]) -> None:
    for what in ("mismatch", "reward"):
        values = np.concatenate([getattr(run, what) for run in runs])
        if np.ptp(values) <= SAME * np.abs(values).max():
            raise UserError(
                f"the {what} of all runs is {values[0]:g} at every step, and nothing can be found "
                f"from that; look at what the runs recorded, and name others"
            )


def _check_alike(runs: Sequence[ObservedRun]) -> None:
    first = runs[0]
    for run in runs[1:]:
        for key in sorted(first.alike.keys() | run.alike.keys()):
            one, other = first.alike.get(key, "not set"), run.alike.get(key, "not set")
            if one != other:
                raise UserError(
                    f"runs {first.name} and {run.name} differ in {key} ({one}, {other}), and a "
                    "calibration is of runs that differ in plan, staleness and seed alone; name "
                    "others"
                )
