"""A simulated cluster in the terminal: what it did, where its time went, and what that costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from lightning_qrl.reports.simulation import LABEL, NO_LIMIT, labelled, plain
from lightning_qrl.reports.simulation_sweep import Cell, bar, heat_map, scale_text
from lightning_qrl.reports.simulation_timeline import AMISS, Glyphs
from lightning_qrl.reports.tables import text_table
from lightning_qrl.simulator.closed_forms import critical_effective
from lightning_qrl.simulator.cluster import Cluster, Headroom, Outcome
from lightning_qrl.simulator.cluster.outcome import Counts, Distribution, Flow

MOST_AGES = 12  # of staleness that are listed one by one
MAPS = {  # of a sweep over two settings: what is drawn, and its form
    "steps an hour": "{:.1f}",
    "mean staleness": "{:.1f}",
    "samplers busy, %": "{:.0f}",
    "trainers busy, %": "{:.0f}",
}


def cluster_text(cluster: Cluster, outcome: Outcome, width: int, glyphs: Glyphs) -> str:
    """What came of a run, a line or more for each of its sides.

    Args:
        cluster: its settings.
        outcome: of the run.
        width: of the terminal.
        glyphs: to draw with.
    """
    time = _time(outcome.seconds / 3600)
    steps = f"{outcome.steps:,} in {time}: {outcome.steps_per_hour:,.1f} an hour"
    lines = {
        "cluster": _system(cluster),
        "steps": outcome.why_no_step or f"{steps}; ended by {outcome.stopped}",
        "tokens/s": (
            f"{outcome.sampled_per_second:,.0f} sampled, "
            f"{outcome.trained_per_second:,.0f} trained on"
        ),
        **_times(outcome),
        "rollouts": _counts(outcome.rollouts),
        "tokens": _counts(outcome.tokens),
        "queue": _flow(outcome.queue, "waiting"),
        "in flight": _flow(outcome.in_flight, "under way"),
        "GPU-hours": f"{_amount(outcome.gpu_hours)}, cost {outcome.cost:,.2f}",
        **_learned(cluster, outcome),
    }
    if outcome.staleness.counts:
        lines["staleness"] = f"rollouts {_quantiles(outcome.staleness)}"
        lines[""] = f"tokens {_quantiles(outcome.token_staleness)}"
    return labelled(lines, width) + _ages(outcome.staleness, glyphs)


def _system(cluster: Cluster) -> str:
    slots, gpus = (sum(getattr(pool, name) for pool in cluster.samplers) for name in POOL)
    trainers = cluster.trainers
    pools = f" in {len(cluster.samplers)} pools" if len(cluster.samplers) > 1 else ""
    cap = "any staleness" if cluster.max_staleness is None else f"staleness {cluster.max_staleness}"
    return (
        f"{slots:,} sampling slots on {gpus:,} GPUs{pools}, trainers: {trainers.count:,} on "
        f"{trainers.count * trainers.gpus:,} GPUs; {cluster.batch:,} groups of "
        f"{cluster.group_size:,} a batch, {cap} allowed"
    )


POOL = ("slots", "gpus")


def _times(outcome: Outcome) -> dict[str, str]:
    """Where the time of both sides went."""
    samplers, trainers = outcome.samplers, outcome.trainers
    pools = ", ".join(f"{busy:.0%}" for busy in samplers.busy_by_pool)
    rereading = f" ({samplers.rereading:.1%} at reading again)" if samplers.rereading else ""
    by_pool = f"; busy by pool {pools}" if len(samplers.busy_by_pool) > 1 else ""
    return {
        "samplers": (
            f"busy {samplers.busy:.1%}{rereading}, waiting for a place in the queue "
            f"{samplers.waits_for_queue:.1%}, for weights {samplers.waits_for_weights:.1%}{by_pool}"
        ),
        "trainers": (
            f"busy {trainers.busy:.1%}, waiting for rollouts {trainers.waits_for_data:.1%}, for "
            f"the slowest {trainers.waits_for_slowest:.1%}, for weights "
            f"{trainers.waits_for_weights:.1%}"
        ),
    }


def _counts(counts: Counts) -> str:
    return (
        f"{counts.started:,}: {counts.consumed:,} trained on, {counts.discarded:,} discarded "
        f"({counts.discarded_share:.1%}), {counts.queued:,} queued, {counts.running:,} unfinished"
    )


def _flow(flow: Flow, what: str) -> str:
    return (
        f"{flow.mean_number:,.1f} rollouts {what} on average, {flow.most:,} at most; "
        f"{flow.mean_seconds:,.1f} s each"
    )


def _learned(cluster: Cluster, outcome: Outcome) -> dict[str, str]:
    learned, start = outcome.learned, cluster.learning.reward_start
    if not learned.reward:
        return {}
    step, limited = learned.diverged_at_step, math.isfinite(critical_effective(cluster.learning))
    ended = "did not diverge" if step is None else f"DIVERGED at step {step} (counted from 0)"
    drift = f"{learned.drift[-1]:.2f}, diverged above {cluster.learning.divergence:g}; {ended}"
    lines = {
        "reward": f"{start:.3f} -> {learned.reward[-1]:.3f}",
        "drift": drift if limited else NO_LIMIT,
        "mismatch": (
            f"mean {sum(learned.mismatch) / len(learned.mismatch):.4f}, of which quantization "
            f"makes {cluster.floor:.4f}"
        ),
    }
    target = outcome.target
    if target is not None and target.steps is None:
        why = f": {target.why_not}" if target.why_not else ""
        lines["target"] = f"reward {target.reward:g} is not reached{why}"
    elif target is not None:
        lines["target"] = (
            f"reward {target.reward:g} after {target.steps:,} steps: {_time(target.hours or 0)}, "
            f"{_amount(target.gpu_hours or 0)} GPU-hours, cost {target.cost:,.2f}"
        )
    return lines


def _time(hours: float) -> str:
    return f"{hours:,.2f} h" if hours >= 0.1 else f"{3600 * hours:.1f} s"


def _amount(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _quantiles(of: Distribution) -> str:
    return (
        f"mean {of.mean:.2f} versions; 50% up to {of.p50}, 90% up to {of.p90}, 99% up to {of.p99}, "
        f"all up to {of.largest}"
    )


def _ages(of: Distribution, glyphs: Glyphs) -> str:
    """A bar for each age of rollouts; the oldest ones together."""
    total = sum(count for _, count in of.counts)
    shares = [(str(age), count / total) for age, count in of.counts]
    if len(shares) > MOST_AGES:
        rest = sum(share for _, share in shares[MOST_AGES - 1 :])
        shares = [*shares[: MOST_AGES - 1], (f"{of.counts[MOST_AGES - 1][0]}+", rest)]
    return "".join(
        f"{'':{LABEL}}{age:>4} {share:6.1%} {bar(share, 1.0, glyphs)}".rstrip() + "\n"
        for age, share in shares
    )


def outcome_json(outcome: Outcome, *, whole: bool = True) -> dict[str, Any]:
    """An outcome as plain values.

    Args:
        outcome: of a run.
        whole: with every phase and every step.
    """
    made = asdict(outcome)
    if not whole:
        del made["phases"]
        steps = made.pop("learned")
        made["final_reward"] = steps["reward"][-1] if steps["reward"] else None
        made["diverged_at_step"] = steps["diverged_at_step"]
    return made


def cluster_table(outcomes: Mapping[tuple[Any, ...], Outcome], axis: str) -> str:
    """A line for each value of one setting."""
    headings = [
        axis,
        "steps/h",
        "stale",
        "p99",
        "lost",
        "samplers",
        "trainers",
        "reward",
        "diverged",
    ]
    rows = [[plain(at[0]), *_row(outcome)] for at, outcome in outcomes.items()]
    legend = "stale: mean versions behind; lost: share of rollouts; samplers, trainers: busy\n"
    return text_table(headings, rows) + legend


def _row(outcome: Outcome) -> list[str]:
    learned = outcome.learned
    step = learned.diverged_at_step
    return [
        f"{outcome.steps_per_hour:,.1f}",
        f"{outcome.staleness.mean:.2f}",
        str(outcome.staleness.p99),
        f"{outcome.rollouts.discarded_share:.1%}",
        f"{outcome.samplers.busy:.1%}",
        f"{outcome.trainers.busy:.1%}",
        f"{learned.reward[-1]:.3f}" if learned.reward else "",
        "no step" if outcome.why_no_step else "" if step is None else f"{AMISS} at {step}",
    ]


def cluster_maps(
    outcomes: Mapping[tuple[Any, ...], Outcome], axes: Sequence[str], width: int, glyphs: Glyphs
) -> list[Text]:
    """A heat map over two settings for each thing that one wants to know."""
    lines: list[Text] = []
    for name, form in MAPS.items():
        cells = {at: _cell(outcome, name) for at, outcome in outcomes.items()}
        lines += [*heat_map(cells, axes, width, form, glyphs)]
        lines += [*scale_text(cells, name, form, glyphs), Text()]
    return lines


def _cell(outcome: Outcome, name: str) -> Cell:
    values = {
        "steps an hour": outcome.steps_per_hour,
        "mean staleness": outcome.staleness.mean,
        "samplers busy, %": 100 * outcome.samplers.busy,
        "trainers busy, %": 100 * outcome.trainers.busy,
    }
    diverged = outcome.learned.diverged_at_step is not None
    return Cell(None if outcome.why_no_step else values[name], AMISS if diverged else "")


def headroom_text(headroom: Headroom, width: int) -> str:
    """The largest stable staleness, and what each cap that was tried does."""
    cap, margin = headroom.max_staleness, f"with a margin of {headroom.margin:.0%}"
    if headroom.any_cap:
        said = f"stable {margin} without a cap; rollouts get at most {cap} versions old"
    elif cap is None:
        said = f"no max_staleness is stable {margin}"
    else:
        said = f"max_staleness up to {cap} is stable {margin}"
    rows = [
        [
            "none" if tried.max_staleness is None else str(tried.max_staleness),
            f"{tried.effective:.4f}",
            "yes" if tried.stable else f"{AMISS} diverged" if tried.diverged else "no",
            f"{tried.mean_staleness:.2f}",
            f"{tried.discarded_share:.1%}",
            f"{tried.steps_per_hour:,.1f}",
        ]
        for tried in headroom.tried
    ]
    headings = ["max_staleness", "effective", "stable", "stale", "lost", "steps/h"]
    critical = f"critical effective mismatch {headroom.critical:.4f}"
    return labelled({"stable": f"{said}; {critical}"}, width) + text_table(headings, rows)
