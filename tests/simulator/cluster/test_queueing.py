"""Theory that knows nothing of this code: queues, and what is written on staleness."""

import math

import numpy as np
import pytest

from lightning_qrl.simulator.closed_forms import mean_staleness, steady_staleness
from lightning_qrl.simulator.cluster import Cluster, Lognormal, Samplers, Trainers, WeightSync, run

SPEED = 10.0  # tokens/s of a slot


def trained(rho, *, slots, lengths, **settings):
    """A trainer whose steps last what makes rollouts come rho times as fast as they are taken."""
    completions = settings["batch"] * settings["group_size"]
    overhead = rho * completions / (slots * SPEED / lengths.mean)
    given = {
        "samplers": (Samplers(slots=slots, tokens_per_second=SPEED),),
        "trainers": Trainers(count=1, tokens_per_second=math.inf, overhead=overhead),
        "lengths": lengths,
        "max_staleness": None,
        "weights": WeightSync(parameters=0, latency=0),
        "duration": None,
    }
    return Cluster(**{**given, **settings})


def test_many_samplers_and_a_steady_trainer_are_an_m_d_1_queue():
    # What very many independent samplers finish comes at times of a Poisson process. So the number
    # that the trainer leaves in the queue when it takes a rollout has Pollaczek and Khinchine's
    # mean, load^2 / (2 (1 - load)) with steps of one length. Standard error: 4%, from batches of
    # 1,000. Tokens are so many that completions do not end on a grid.
    load, lengths = 0.5, Lognormal(mean=20e6, spread=1.0, limit=10**9)
    cluster = trained(
        load, slots=1500, lengths=lengths, batch=1, group_size=1, queue_depth=None, steps=25_000
    )
    late = run(cluster).phases[5000:]  # slots that begin together take a while to forget it
    left = [phase.waiting - 1 for phase in late]
    assert np.mean(left) == pytest.approx(load**2 / (2 * (1 - load)), rel=0.12)


def longest(lengths, size):
    """M: the mean longest of a group over the mean."""
    drawn = lengths.draw(np.random.default_rng(1), 20_000 * size).reshape(-1, size)
    return drawn.max(axis=1).mean() / drawn.mean()


def measured(cluster):
    """Mean age after the start, where all samplers begin together."""
    late = run(cluster).phases[150:]
    return sum(age * count for p in late for age, count in p.ages) / (len(late) * cluster.batch)


def test_applied_compute_s_mean_staleness_of_few_samplers():
    # One step's completions at a time: the age is about 2, and rho's share of it counts.
    lengths = Lognormal(mean=1000, spread=0.5, limit=10**6)
    for rho in (0.3, 0.6):
        cluster = trained(
            rho, slots=64, lengths=lengths, batch=8, group_size=8, queue_depth=1,
            when_full="drop_oldest", steps=1000,
        )  # fmt: skip
        tail = longest(lengths, 8)
        expected = mean_staleness(concurrency=64, batch=64, tail=tail, rho=rho, queue=1)
        assert measured(cluster) == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(("rho", "depth"), [(0.5, 1), (0.6, 1), (1.5, 1), (1.5, 2), (3.0, 3)])
def test_applied_compute_s_mean_staleness(rho, depth):
    lengths = Lognormal(mean=1000, spread=0.5, limit=10**6)
    cluster = trained(
        rho, slots=512, lengths=lengths, batch=8, group_size=8, queue_depth=depth,
        when_full="drop_oldest", steps=600,
    )  # fmt: skip
    tail = longest(lengths, 8)
    expected = mean_staleness(concurrency=512, batch=64, tail=tail, rho=rho, queue=depth)
    assert measured(cluster) == pytest.approx(expected, rel=0.02)


def test_where_applied_compute_s_mean_staleness_breaks():
    lengths = Lognormal(mean=1000, spread=0.5, limit=10**6)
    tail = longest(lengths, 8)

    def more(rho, **settings):
        """Versions that the formula leaves out."""
        given = {"batch": 8, "group_size": 8, "queue_depth": 1, "when_full": "drop_oldest"}
        cluster = trained(rho, slots=512, lengths=lengths, steps=600, **{**given, **settings})
        return measured(cluster) - mean_staleness(
            concurrency=512, batch=64, tail=tail, rho=rho, queue=1
        )

    assert abs(more(0.5)) < 0.3
    # Weights that come every third step are one step older in the mean of 0, 1 and 2.
    assert more(0.5, weight_sync_every=3) == pytest.approx(1.0, abs=0.3)
    # A cap below the mean age.
    assert more(0.5, max_staleness=12) < -3
    # Samplers that wait for a place in the queue: what is under way when it fills comes on top.
    assert more(3.0, when_full="wait") > 3
    # Near balance, chance lets the queue overflow at one time and run empty at another.
    assert more(0.95) < -0.5


def test_huang_s_steady_staleness():
    # The versions that appear while a rollout runs: all but rho of the mean age where samplers are
    # the slower side; too many where they are the faster one.
    lengths = Lognormal(mean=1000, spread=0.5, limit=10**6)
    latency = longest(lengths, 8) * 1000 / SPEED

    def both(rho):
        cluster = trained(
            rho, slots=512, lengths=lengths, batch=8, group_size=8, queue_depth=1,
            when_full="drop_oldest", steps=600,
        )  # fmt: skip
        return measured(cluster), steady_staleness(latency, cluster.trainers.overhead, rho)

    age, steady = both(0.5)
    assert age - 0.5 == pytest.approx(steady, rel=0.02)
    age, steady = both(3.0)
    assert steady > 1.8 * age


@pytest.mark.parametrize(("slots", "busy"), [(8, 8 / 10), (16, 16 / 18), (40, 40 / 42)])
def test_a_deterministic_queue(slots, busy):
    # D/D/1, with 8 s a step of 8 and 10 s a rollout. With 8 slots the trainer waits 2 s of 10. With
    # more of them, all finish at once and fill the queue; when it has room again, the trainer has
    # one batch left, 8 s of work, and the next ones come after 10: it waits 2 s a round.
    cluster = Cluster(
        samplers=(Samplers(slots=slots, tokens_per_second=SPEED),),
        trainers=Trainers(count=1, tokens_per_second=math.inf, overhead=8.0),
        lengths=Lognormal(mean=100, spread=0, limit=100),
        group_size=1,
        batch=8,
        max_staleness=None,
        weights=WeightSync(parameters=0, latency=0),
        duration=20_000.0,
    )
    outcome = run(cluster)
    assert outcome.trainers.busy == pytest.approx(busy, abs=2e-3)
    assert outcome.queue.most == slots - 8
