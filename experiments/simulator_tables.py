"""The tables of `simulator.py`: the calibration, and predictions beside what was measured.

A prediction is made from a run's settings and the calibration alone, with other seeds than the
run's. Its spread is that of single runs over its own seeds: what chance alone makes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from simulator_grid import COMMON, STEPS, VALIDATION

from lightning_qrl.reports.calibration import METRICS, calibration_text, observed
from lightning_qrl.simulator.calibrated import Calibration, ObservedRun, calibrate, predict
from lightning_qrl.simulator.cluster import Outcome, from_asynchrony, run
from lightning_qrl.tracking.notebook import RecordedRun, select_runs

WAIT, SECONDS = "async/trainer_wait", "train/step_time"
PLAN, GROUPS = "4bitter", 8
PREDICTIONS, FIRST_SEED = 20, 1000
LATE = 10  # steps


@dataclass(frozen=True)
class Flow:
    """Of one run, predicted or measured: shares by lag, discarded share, steps per step's time."""

    shares: Mapping[int, float]
    mean: float
    discarded: float
    steps: float


def show(uri: str, save: Path | None) -> Iterator[str]:
    """All tables."""
    runs = [observed(run) for run in select_runs(uri, ["calibration"]).read(METRICS)]
    calibration = calibrate(runs)
    if save is not None:
        save.write_text(calibration.to_json(), encoding="utf-8")
    yield "```\n" + calibration_text(calibration) + "```\n"
    yield from floors_and_lags(runs)
    recorded = select_runs(uri, ["validation"]).read([*METRICS, WAIT, SECONDS])
    recorded = [run for run in recorded if run.status == "FINISHED"]
    by_name = {
        name: [run for run in recorded if run.name.rpartition("-seed")[0] == name]
        for name in VALIDATION
    }
    outcomes = {name: predictions(knobs) for name, knobs in VALIDATION.items()}
    yield from flow_table(by_name, outcomes, calibration)
    yield from share_table(by_name, outcomes)
    yield from learning_table(by_name, outcomes, calibration)


def predictions(knobs: Mapping[str, float | bool]) -> list[Outcome]:
    """A setting, over seeds."""
    return [
        run(
            from_asynchrony(groups=GROUPS, phases=STEPS["validation"], seed=FIRST_SEED + s, **knobs)
        )
        for s in range(PREDICTIONS)
    ]


def predicted_flow(outcome: Outcome, name: str) -> Flow:
    """Of groups, whose tokens the trainer counts; in flight, of tokens evenly over their time."""
    in_flight = VALIDATION[name].get("in_flight_update")
    found = outcome.token_staleness if in_flight else outcome.staleness
    total = sum(count for _, count in found.counts)
    shares = {lag: count / total for lag, count in found.counts}
    discarded, speed = outcome.rollouts.discarded_share, outcome.steps / outcome.seconds
    return Flow(shares, found.mean, discarded, speed)


def measured_flow(recorded: RecordedRun) -> Flow:
    """From its metrics."""
    seen, shares = observed(recorded), Counter[int]()
    for lags in seen.lags:
        for lag, share in lags:
            shares[round(lag)] += share / len(seen.lags)
    trained = GROUPS * len(seen.lags)
    waited = recorded.metrics[WAIT].values
    discarded = seen.discarded / (seen.discarded + trained)
    mean = sum(lag * share for lag, share in shares.items())
    return Flow(shares, mean, discarded, len(waited) / float(np.sum(1 + waited)))


def pooled(flows: Sequence[Flow]) -> Flow:
    """Means over runs."""
    lags = {lag for flow in flows for lag in flow.shares}
    shares = {lag: float(np.mean([f.shares.get(lag, 0.0) for f in flows])) for lag in sorted(lags)}
    columns = zip(*((flow.mean, flow.discarded, flow.steps) for flow in flows), strict=True)
    mean, discarded, steps = (float(np.mean(column)) for column in columns)
    return Flow(shares, mean, discarded, steps)


def distance(one: Flow, other: Flow) -> float:
    """Total variation distance of their lags."""
    lags = one.shares.keys() | other.shares.keys()
    return 0.5 * sum(abs(one.shares.get(g, 0.0) - other.shares.get(g, 0.0)) for g in lags)


Runs = Mapping[str, list[RecordedRun]]
Outcomes = Mapping[str, list[Outcome]]


def flow_table(runs: Runs, outcomes: Outcomes, calibration: Calibration) -> Iterator[str]:
    """Staleness, discarded share and speed: predicted ± deviation over its seeds, then measured."""
    heads = ["setting", "runs", "mean staleness", "measured", "distance", "by chance", "discarded",
             "measured", "steps a step's time", "measured", "steps/s", "measured"]  # fmt: skip
    yield row(heads) + "\n" + row(["---"] * len(heads))
    plan = calibration.plan(PLAN)
    assert plan.sampling_seconds is not None
    assert plan.update_seconds is not None
    speed = 1 / (plan.sampling_seconds + plan.update_seconds)
    for name, own in runs.items():
        made = [predicted_flow(outcome, name) for outcome in outcomes[name]]
        seen, all_made = [measured_flow(one) for one in own], pooled(made)
        if not seen:
            continue
        yield row([
            name, f"{len(seen)}", spread([f.mean for f in made]), spread([f.mean for f in seen]),
            f"{np.mean([distance(f, all_made) for f in seen]):.3f}",
            f"{np.mean([distance(f, all_made) for f in made]):.3f}",
            spread([100 * f.discarded for f in made], "%"),
            spread([100 * f.discarded for f in seen], "%"),
            spread([f.steps for f in made]), spread([f.steps for f in seen]), f"{speed:.2f}",
            spread([1 / float(np.mean(one.metrics[SECONDS].values)) for one in own]),
        ])  # fmt: skip
    yield ""


def share_table(runs: Runs, outcomes: Outcomes) -> Iterator[str]:
    """Shares of tokens by lag, predicted and measured, in percent."""
    lags = range(max(int(k["max_staleness"]) for k in VALIDATION.values()) + 1)
    yield row(["setting", *(f"lag {lag}" for lag in lags)]) + "\n" + row(["---"] * (len(lags) + 1))
    for name, own in runs.items():
        if own:
            made = pooled([predicted_flow(outcome, name) for outcome in outcomes[name]])
            seen = pooled([measured_flow(one) for one in own])
            pairs = [(made.shares.get(lag, 0.0), seen.shares.get(lag, 0.0)) for lag in lags]
            cells = [f"{100 * a:.1f} / {100 * b:.1f}" if a or b else "" for a, b in pairs]
            yield row([name, *cells])
    yield ""


def learning_table(runs: Runs, outcomes: Outcomes, calibration: Calibration) -> Iterator[str]:
    """What the calibrated model says of these runs' mismatch and reward."""
    heads = ["setting", "runs", "mean mismatch", "measured", "last rewards", "measured",
             "held-out reward", "measured"]  # fmt: skip
    yield row(heads) + "\n" + row(["---"] * len(heads))
    for name, own in runs.items():
        if not own:
            continue
        made = [
            predict(calibration, PLAN, ages(outcome, name), GROUPS) for outcome in outcomes[name]
        ]
        seen = [observed(one) for one in own]
        late = round(float(np.mean([one.usual_lag for one in seen])))
        yield row([
            name, f"{len(own)}", spread([float(np.mean(p.mismatch)) for p in made], digits=4),
            spread([float(np.mean(r.mismatch)) for r in seen], digits=4),
            spread([float(np.mean(p.reward[-LATE - late - 1 : -late - 1])) for p in made]),
            spread([float(np.mean(r.reward[-LATE:])) for r in seen]),
            spread([p.reward[-1] for p in made]), spread([r.held_out[-1][1] for r in seen]),
        ])  # fmt: skip
    notes = dict.fromkeys(note for p in made for note in p.notes)
    yield "\n" + "\n".join(f"Note of every prediction: {note}." for note in notes) + "\n"


def ages(outcome: Outcome, name: str) -> list[list[float]]:
    """Of each step's rollouts; where they have several versions, their mean."""
    if VALIDATION[name].get("in_flight_update"):
        return [[phase.mean_age] for phase in outcome.phases]
    return [
        [float(age) for age, count in phase.ages for _ in range(count)] for phase in outcome.phases
    ]


def floors_and_lags(runs: Sequence[ObservedRun]) -> Iterator[str]:
    """Is mismatch additive in floor and lag? What a plan adds to the first one's, by lag."""
    ordered = sorted(runs, key=lambda run: (run.usual_lag, run.recipe))
    means = {
        key: float(np.mean([np.mean(run.mismatch) for run in own]))
        for key, own in groupby(ordered, key=lambda run: (round(run.usual_lag), run.recipe))
    }
    lags, plans = sorted({lag for lag, _ in means}), sorted({plan for _, plan in means})
    yield row(["mean mismatch", *(f"lag {lag}" for lag in lags)])
    yield row(["---"] * (len(lags) + 1))
    for plan in plans:
        yield row([plan, *(f"{means[lag, plan]:.4f}" for lag in lags if (lag, plan) in means)])
    yield ""


def spread(values: Sequence[float], unit: str = "", digits: int = 3) -> str:
    """Mean ± standard deviation."""
    form = ".1f" if unit else f".{digits}f"
    mean = f"{np.mean(values):{form}}{unit}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):{form}}"


def row(cells: Sequence[str]) -> str:
    """Of a table in Markdown."""
    return "| " + " | ".join(cells) + " |"


assert "grpo.prompts_per_rollout=8" in COMMON, "GROUPS is what the runs have"
