"""How stale a cluster may let its rollouts become: the largest cap that keeps the drift bounded.

A cap is stable if the drift does not diverge within the window, and the effective mismatch of the
window's second half, averaged over its steps, stays below the critical one (`closed_forms`) by a
margin:

    (1 + margin) effective <= critical

The average is what counts, since a step's growth of the drift is linear in it. The caps are
bisected: a larger cap lets older rollouts through, so that what is unstable stays so above.
"""

import math
from dataclasses import dataclass, replace

from lightning_qrl.simulator.closed_forms import critical_effective
from lightning_qrl.simulator.cluster.measure import run
from lightning_qrl.simulator.cluster.outcome import Outcome
from lightning_qrl.simulator.cluster.settings import Cluster
from lightning_qrl.simulator.cluster.workload import check_workload

LEAST_STEPS = 20  # of a window that is judged


@dataclass(frozen=True, slots=True)
class Cap:
    """What one ``max_staleness`` does.

    Attributes:
        max_staleness: the cap; None for no cap.
        effective: mismatch, mean over the second half of the steps.
        diverged: the drift did.
        stable: with the margin.
        mean_staleness: of rollouts.
        discarded_share: of rollouts.
        steps_per_hour: optimizer steps.
    """

    max_staleness: int | None
    effective: float
    diverged: bool
    stable: bool
    mean_staleness: float
    discarded_share: float
    steps_per_hour: float


@dataclass(frozen=True, slots=True)
class Headroom:
    """The largest cap that is stable.

    Attributes:
        max_staleness: it; None if not even the least cap is stable.
        any_cap: the cluster is stable without a cap too; ``max_staleness`` is then the oldest that
            rollouts get, and a larger one would do nothing.
        critical: effective mismatch that nothing holds.
        margin: that was asked for.
        tried: caps, in ascending order; no cap comes last.
    """

    max_staleness: int | None
    any_cap: bool
    critical: float
    margin: float
    tried: tuple[Cap, ...]


def largest_stable_staleness(cluster: Cluster, margin: float = 0.1) -> Headroom:
    """The largest ``max_staleness`` that is stable with a margin.

    Args:
        cluster: its own ``max_staleness`` plays no part.
        margin: relative, of the effective mismatch; at least 0.

    Raises:
        ValueError: the margin is impossible, the window has too few steps to judge, or the
            search would take more than about two minutes.
    """
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin must be at least 0, got {margin}")
    critical = critical_effective(cluster.learning)
    tried: dict[int | None, Cap] = {}

    def stable(cap: int | None) -> bool:
        outcome = run(replace(cluster, max_staleness=cap))
        tried[cap] = _judged(cap, outcome, critical / (1 + margin))
        return tried[cap].stable

    least = (cluster.weight_sync_every - 1) * cluster.updates
    uncapped = run(replace(cluster, max_staleness=None))
    tried[None] = _judged(None, uncapped, critical / (1 + margin))
    # A cap between 0 and the updates of a phase is refused; ages are whole phases.
    caps = range(least, uncapped.staleness.largest + 1, cluster.updates)
    largest: int | None = None
    if tried[None].stable:
        largest = uncapped.staleness.largest
    else:
        check_workload(cluster, len(caps).bit_length())
        good, bad = -1, len(caps)  # places in caps
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if stable(caps[middle]) else (good, middle)
        largest = caps[good] if good >= 0 else None
    ascending = sorted(
        tried.values(), key=lambda c: math.inf if c.max_staleness is None else c.max_staleness
    )
    return Headroom(largest, tried[None].stable, critical, margin, tuple(ascending))


def _judged(cap: int | None, outcome: Outcome, most: float) -> Cap:
    if outcome.steps < LEAST_STEPS:
        raise ValueError(
            f"duration={outcome.seconds:g} s is too short to judge max_staleness={cap}: "
            f"{outcome.steps} optimizer steps, and {LEAST_STEPS} are needed; raise it"
        )
    late = outcome.learned.effective[outcome.steps // 2 :]
    effective = math.fsum(late) / len(late)
    diverged = outcome.learned.diverged_at_step is not None
    return Cap(
        max_staleness=cap,
        effective=effective,
        diverged=diverged,
        stable=not diverged and effective <= most,
        mean_staleness=outcome.staleness.mean,
        discarded_share=outcome.rollouts.discarded_share,
        steps_per_hour=outcome.steps_per_hour,
    )
