"""A simulated cluster in the terminal: what it did, where its time went, and what that costs."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from lightning_qrl.reports.simulation import LABEL, NO_LIMIT, labelled
from lightning_qrl.reports.simulation_sweep import bar
from lightning_qrl.reports.simulation_timeline import AMISS, Glyphs
from lightning_qrl.reports.tables import text_table
from lightning_qrl.simulator.closed_forms import critical_effective
from lightning_qrl.simulator.cluster import Cluster, Headroom, Outcome
from lightning_qrl.simulator.cluster.outcome import Counts, Distribution, Flow
from lightning_qrl.simulator.words import plain

MOST_AGES = 12  # of staleness that are listed one by one
MOST_VALUES = 3  # of a list that are written out


def cluster_text(
    cluster: Cluster, outcome: Outcome, width: int, glyphs: Glyphs, plan: str = ""
) -> str:
    """What came of a run, a line or more for each of its sides.

    Args:
        cluster: its settings.
        outcome: of the run.
        width: of the terminal.
        glyphs: to draw with.
        plan: of the calibration that learning, floor and times are from; else empty.
    """
    time = _time(outcome.seconds / 3600)
    steps = f"{outcome.steps:,} in {time}: {outcome.steps_per_hour:,.1f} an hour"
    lines = {
        "cluster": _system(cluster),
        "settings": settings_text(cluster, plan),
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
        **({"GPU-hours": _spent(outcome.gpu_hours, outcome.cost)} if outcome.gpu_hours else {}),
        **_learned(cluster, outcome),
    }
    if outcome.staleness.counts:
        lines["staleness"] = f"rollouts {_quantiles(outcome.staleness)}"
        lines[""] = f"tokens {_quantiles(outcome.token_staleness)}"
    return labelled(lines, width) + _ages(outcome.staleness, glyphs)


def _system(cluster: Cluster) -> str:
    slots, gpus = (sum(getattr(pool, name) for pool in cluster.samplers) for name in POOL)
    trainers = cluster.trainers
    of_samplers, of_trainers = _on(gpus), _on(trainers.count * trainers.gpus)
    pools = f" in {len(cluster.samplers)} pools" if len(cluster.samplers) > 1 else ""
    cap = "any staleness" if cluster.max_staleness is None else f"staleness {cluster.max_staleness}"
    return (
        f"{slots:,} sampling slots{of_samplers}{pools}, trainers: {trainers.count:,}{of_trainers}; "
        f"{cluster.batch:,} groups of {cluster.group_size:,} a batch, {cap} allowed"
    )


def _on(gpus: int) -> str:
    return f" on {gpus:,} GPUs" if gpus else ""


def settings_text(cluster: Cluster, plan: str = "", without: Collection[str] = ()) -> str:
    """Settings that differ from the defaults, as they would be given.

    Args:
        cluster: its settings.
        plan: of a calibration, which has learning and floor; else empty.
        without: dotted keys to leave out.
    """
    usual, own = dict(_leaves(Cluster().to_mapping())), dict(_leaves(cluster.to_mapping()))
    fitted = ("learning.", "floor") if plan else ()
    if isinstance(own.get("samplers"), list):
        own["samplers"] = [_unusual(pool) for pool in own["samplers"]]
    changed = {
        key: value
        for key, value in own.items()
        if (key not in usual or usual[key] != value)
        and key not in without
        and not (fitted and key.startswith(fitted))
    }
    said = [f"{key}={_short(value)}" for key, value in changed.items()]
    return " ".join([*([f"plan={plan}"] if plan else []), *said]) or "the defaults"


def _unusual(pool: Mapping[str, Any]) -> dict[str, Any]:
    usual = Cluster().to_mapping()["samplers"]
    return {key: value for key, value in pool.items() if usual[key] != value}


def settings_json(cluster: Cluster, plan: str = "") -> dict[str, Any]:
    """All settings, as YAML has them, and the plan of a calibration."""
    return {"settings": cluster.to_mapping(), **({"plan": plan} if plan else {})}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """By dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    """A value in YAML; a long list by its first values."""
    if isinstance(value, list):
        first = [_short(one) for one in value[:MOST_VALUES]]
        more = [f".. {len(value):,} in all"] if len(value) > MOST_VALUES else []
        return f"[{', '.join([*first, *more])}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_short(part)}' for key, part in value.items())}}}"
    return plain(value)


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
            f"reward {target.reward:g} after {target.steps:,} steps: {_time(target.hours or 0)}"
        )
        if target.gpu_hours:
            lines["target"] += f"; GPU-hours {_spent(target.gpu_hours, target.cost or 0.0)}"
    return lines


def _time(hours: float) -> str:
    return f"{hours:,.2f} h" if hours >= 0.1 else f"{3600 * hours:.1f} s"


def _spent(hours: float, cost: float) -> str:
    return f"{_amount(hours)}, at ${cost:,.2f}"


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
    headings = ["max_staleness", "effective", "stable", "stale", "discarded", "steps/h"]
    critical = f"critical effective mismatch {headroom.critical:.4f}"
    return labelled({"stable": f"{said}; {critical}"}, width) + text_table(headings, rows)
