"""What a run will take, as it is estimated before it, against what the run then was."""

import math
from dataclasses import replace

import pytest

from lightning_qrl.simulator.cluster import (
    Cluster,
    Lognormal,
    Samplers,
    Trainers,
    WeightSync,
    from_asynchrony,
    run,
)
from lightning_qrl.simulator.cluster.workload import check_workload, workload

AT_ONCE = WeightSync(parameters=0, latency=0)
SLOW = Trainers(count=1, tokens_per_second=5000.0)
FAST = Trainers(count=16, tokens_per_second=200_000.0, overhead=0.1)

CLUSTERS = {
    "defaults": Cluster(),
    "trainers are slower": Cluster(trainers=SLOW, max_staleness=None, duration=20_000.0),
    "trainers are slower, stale ones are discarded": Cluster(trainers=SLOW, duration=20_000.0),
    "trainers are slower, the oldest are dropped": Cluster(trainers=SLOW, when_full="drop_oldest"),
    "samplers are slower": Cluster(trainers=FAST, batch=8, weights=AT_ONCE),
    "synchronous": Cluster(max_staleness=0, duration=20_000.0),
    "so many steps": Cluster(duration=None, steps=20, max_staleness=None),
    "several updates": Cluster(duration=None, steps=40, updates=4, max_staleness=4),
    "an instant queue": from_asynchrony(groups=8, phases=500, max_staleness=4),
    "the trainer's schedule": from_asynchrony(
        groups=8, phases=500, max_staleness=4, completion_time=3.0, completion_time_spread=0.5
    ),
    "no queue's end": Cluster(queue_depth=None, trainers=SLOW, max_staleness=None),
    "a rare long completion": Cluster(lengths=Lognormal(mean=1500, spread=2.0)),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_estimate_is_near(name):
    cluster = CLUSTERS[name]
    expected, outcome = workload(cluster), run(cluster)
    begun = outcome.rollouts.started * cluster.group_size
    assert 0.6 * begun < expected.completions < 3.2 * begun
    phases = len(outcome.phases)
    assert 0.9 * phases < expected.phases < 4 * phases  # it knows of no discards


@pytest.mark.parametrize(
    ("cluster", "lower"),
    [
        (Cluster(duration=3e8), "duration or samplers.slots"),
        (Cluster(duration=None, steps=10**7), "steps"),
        (Cluster(steps=10**7, duration=3e8), "duration or steps"),
        (Cluster(duration=None, steps=10**7, updates=1000, max_staleness=None), "steps"),
        (Cluster(samplers=(Samplers(slots=10**6),) * 9), "duration or samplers.slots"),
        (Cluster(when_full="drop_oldest", duration=1e7), "duration or samplers.slots"),
    ],
)
def test_what_would_take_minutes_is_refused(cluster, lower):
    says = f"to simulate, and a minute is the most; lower {lower}$"
    for refuse in (check_workload, run):
        with pytest.raises(ValueError, match=says) as refused:
            refuse(cluster)
        assert "\n" not in str(refused.value)


def test_a_search_is_refused_by_all_of_its_runs():
    cluster = Cluster(duration=3e5)
    check_workload(cluster)
    check_workload(replace(cluster, duration=1e5), 5)
    with pytest.raises(ValueError, match="to simulate 5 times, and a minute is the most"):
        check_workload(cluster, 5)


def test_weights_that_change_in_mid_flight_take_work_by_slots_and_syncs():
    pool = Samplers(slots=4096, tokens_per_second=60.0)
    of = {"samplers": (pool,), "trainers": FAST, "batch": 1, "weights": AT_ONCE, "duration": 3600.0}
    seldom, often = (workload(Cluster(**of, in_flight_update=flag)) for flag in (False, True))
    more = often.seconds - seldom.seconds
    assert math.isclose(more, 1.5e-6 * 4096 * often.phases)
    assert more > 10
