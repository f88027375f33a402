"""The largest stable cap against a search through all of them."""

import math
from dataclasses import replace

import pytest

from lightning_qrl.simulator.closed_forms import critical_effective, critical_staleness
from lightning_qrl.simulator.cluster import (
    Cluster,
    Lognormal,
    Samplers,
    Trainers,
    WeightSync,
    largest_stable_staleness,
    run,
)


def cluster(slots=60, **changes):
    given = {
        "samplers": (Samplers(slots=slots, tokens_per_second=10.0),),
        "trainers": Trainers(count=1, tokens_per_second=math.inf, overhead=10.0),
        "lengths": Lognormal(mean=1000, spread=0.6, limit=4000),
        "group_size": 1,
        "batch": 8,
        "queue_depth": 3,
        "weights": WeightSync(parameters=0, latency=0),
        "duration": 4000.0,
    }
    return Cluster(**{**given, **changes})


def stable(of, cap, margin):
    """By the definition."""
    learned = run(replace(of, max_staleness=cap)).learned
    late = learned.effective[len(learned.effective) // 2 :]
    holds = (1 + margin) * sum(late) / len(late) <= critical_effective(of.learning)
    return holds and learned.diverged_at_step is None


@pytest.mark.parametrize(("floor", "margin"), [(0.0103, 0.0), (0.0103, 0.5), (0.03, 0.1)])
def test_the_largest_stable_cap(floor, margin):
    of = cluster(floor=floor)
    found = largest_stable_staleness(of, margin)
    assert not found.any_cap
    by_search = [cap for cap in range(12) if stable(of, cap, margin)]
    assert by_search == list(range(found.max_staleness + 1))
    assert [cap.max_staleness for cap in found.tried][-1] is None
    assert all(c.stable == (c.max_staleness in by_search) for c in found.tried)
    assert len(found.tried) < 7


def test_a_larger_margin_or_floor_never_allows_more():
    caps = [largest_stable_staleness(cluster(), margin).max_staleness for margin in (0, 0.5, 2)]
    assert caps == sorted(caps, reverse=True)
    assert caps[0] > caps[-1]


def test_a_cluster_that_cannot_get_too_old():
    found = largest_stable_staleness(cluster(slots=12), 0.1)
    assert found.any_cap
    uncapped = run(cluster(slots=12, max_staleness=None))
    assert found.max_staleness == uncapped.staleness.largest
    assert run(cluster(slots=12, max_staleness=found.max_staleness)) == uncapped
    assert len(found.tried) == 1


def test_a_floor_that_is_too_much_alone():
    assert critical_staleness(0.2) == 0
    found = largest_stable_staleness(cluster(floor=0.2), 0.1)
    assert found.max_staleness is None
    assert [cap.stable for cap in found.tried] == [False] * len(found.tried)


def test_caps_are_those_that_the_cluster_may_have():
    found = largest_stable_staleness(cluster(updates=2, weight_sync_every=2, floor=0.001), 0.0)
    caps = [cap.max_staleness for cap in found.tried if cap.max_staleness is not None]
    assert all(cap >= 2 and cap % 2 == 0 for cap in caps)


def test_what_cannot_be_judged():
    with pytest.raises(ValueError, match="duration=60 s is too short .* and 20 are needed"):
        largest_stable_staleness(cluster(duration=60.0))
    with pytest.raises(ValueError, match="margin must be at least 0"):
        largest_stable_staleness(cluster(), -1)
