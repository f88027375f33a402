"""What holds of every cluster: Little's law, and that nothing gets lost."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_qrl.simulator.cluster import (
    Cluster,
    Empirical,
    Lognormal,
    Samplers,
    Trainers,
    WeightSync,
    run,
)
from lightning_qrl.simulator.cluster.measure import distribution
from lightning_qrl.simulator.cluster.system import System


@st.composite
def clusters(draw):
    """Small and odd ones: slow or fast on either side, any queue, any sync."""
    updates, every = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cap = draw(st.none() | st.integers(0, 4).map(lambda n: n * updates))
    if cap is not None:
        every = min(every, cap // updates + 1)
    flight = draw(st.booleans())
    reading = draw(st.sampled_from([20.0, 300.0, math.inf])) if flight else math.inf
    pools = tuple(
        Samplers(
            slots=draw(st.integers(1, 9)),
            tokens_per_second=draw(st.sampled_from([1.0, 7.0, 50.0])),
            prefill_tokens_per_second=reading,
        )
        for _ in range(draw(st.integers(1, 2)))
    )
    depth = draw(st.none() | st.integers(1, 3))
    full = "wait" if depth is None else draw(st.sampled_from(["wait", "drop_oldest"]))
    mean = draw(st.sampled_from([1.0, 20.0, 200.0]))
    lognormal = st.builds(Lognormal, mean=st.just(mean), spread=st.sampled_from([0, 0.5, 2.0]))
    batch, group = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return Cluster(
        samplers=pools,
        trainers=Trainers(
            count=draw(st.integers(1, min(3, batch * group))),
            tokens_per_second=draw(st.sampled_from([10.0, 400.0, math.inf])),
            overhead=draw(st.sampled_from([0.1, 3.0])),
        ),
        lengths=draw(lognormal | st.just(Empirical(values=(3, 4, 90)))),
        group_size=group,
        batch=batch,
        updates=updates,
        queue_depth=depth,
        when_full=full,
        max_staleness=cap,
        weight_sync_every=every,
        in_flight_update=flight,
        weights=WeightSync(
            parameters=0,
            latency=draw(st.sampled_from([0.0, 0.7, 30.0])),
            blocks_trainer=draw(st.booleans()),
        ),
        duration=draw(st.sampled_from([1.0, 30.0, 200.0])),
        steps=draw(st.none() | st.integers(1, 20)),
        seed=draw(st.integers(0, 99)),
    )


@given(clusters())
@settings(max_examples=100, deadline=None)
def test_every_cluster_keeps_its_books(cluster):
    outcome = run(cluster)
    # Little's law, of the queue and of what is in flight.
    for flow in (outcome.queue, outcome.in_flight):
        expected = flow.per_second * flow.mean_seconds
        assert flow.mean_number == pytest.approx(expected, rel=1e-12, abs=1e-15)
    # Rollouts and tokens are somewhere.
    for of in (outcome.rollouts, outcome.tokens):
        assert of.started == of.consumed + of.discarded + of.queued + of.running
        assert min(of.started, of.consumed, of.discarded, of.queued, of.running) >= 0
    assert outcome.rollouts.consumed == cluster.batch * len(outcome.phases)
    # So is the time of both sides.
    of, to = outcome.samplers, outcome.trainers
    assert of.busy + of.waits_for_queue + of.waits_for_weights == pytest.approx(1)
    shares = (to.busy, to.waits_for_slowest, to.waits_for_data, to.waits_for_weights)
    assert sum(shares) == pytest.approx(1)
    assert min(*shares, of.busy, of.waits_for_queue, of.waits_for_weights) >= -1e-12
    assert 0 <= of.rereading <= of.busy


@given(clusters())
@settings(max_examples=60, deadline=None)
def test_in_every_cluster_causes_come_first(cluster):
    outcome = run(cluster)
    ages = Counter()
    before = 0.0
    for number, phase in enumerate(outcome.phases):
        assert phase.version == number * cluster.updates
        assert phase.begin >= before
        assert (phase.end is None) == (number == outcome.steps // cluster.updates)
        before = phase.end or math.inf
        assert sum(count for _, count in phase.ages) == cluster.batch
        assert phase.waiting >= cluster.batch
        ages.update(dict(phase.ages))
    assert outcome.staleness.counts == tuple(sorted(ages.items()))
    assert all(age >= 0 for age in ages)
    if cluster.max_staleness is not None:
        assert all(age <= cluster.max_staleness for age in ages)
    assert outcome.token_staleness.largest <= outcome.staleness.largest
    assert sum(count for _, count in outcome.token_staleness.counts) == outcome.tokens.consumed
    if cluster.when_full == "drop_oldest":
        assert outcome.queue.most <= cluster.limit
    assert (outcome.why_no_step is None) == (outcome.steps > 0)
    assert outcome.steps == len(outcome.learned.reward) <= (cluster.steps or 1e9) + 2


@given(clusters())
@settings(max_examples=30, deadline=None)
def test_little_s_law_is_exact_in_nanoseconds(cluster):
    system = System(cluster)
    system.run()
    for station in (system.flight, system.waiting):
        assert station.area == station.stays


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300))
def test_a_distribution_is_numpy_s(values):
    of = distribution(Counter(values))
    assert of.mean == pytest.approx(np.mean(values))
    expected = np.quantile(values, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf")
    assert [of.p50, of.p90, of.p99, of.largest] == expected.tolist()
    assert sum(count for _, count in of.counts) == len(values)


def test_the_same_cluster_does_the_same_again():
    cluster = Cluster(duration=900.0, in_flight_update=True)
    assert run(cluster) == run(cluster)
    other = Cluster(duration=900.0, in_flight_update=True, seed=1)
    assert run(other).tokens != run(cluster).tokens
