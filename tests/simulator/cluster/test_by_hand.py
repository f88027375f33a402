"""Systems that are small enough to be done by hand."""

import json
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from lightning_qrl.simulator.cluster import (
    Cluster,
    Empirical,
    Lognormal,
    Samplers,
    Trainers,
    WeightSync,
    from_asynchrony,
    run,
)
from lightning_qrl.simulator.cluster.measure import TOY
from lightning_qrl.simulator.constants import POST

AT_ONCE = WeightSync(parameters=0, latency=0)


def cluster(*, slots=1, speed=1.0, tokens=10, overhead=1.0, **settings):
    """Completions of so many tokens; a step takes its overhead alone; weights take no time."""
    given = {
        "samplers": (Samplers(slots=slots, tokens_per_second=speed, gpus=3, price=2.0),),
        "trainers": Trainers(count=1, tokens_per_second=math.inf, overhead=overhead, price=5.0),
        "lengths": Lognormal(mean=tokens, spread=0, limit=10_000),
        "group_size": 1,
        "batch": 1,
        "max_staleness": None,
        "weights": AT_ONCE,
        "duration": 100.0,
    }
    return Cluster(**{**given, **settings})


def begins(outcome):
    return [phase.begin for phase in outcome.phases]


def ages(outcome):
    return [[age for age, count in phase.ages for _ in range(count)] for phase in outcome.phases]


def test_slow_samplers_set_the_pace():
    # 4 slots, 10 s each, 4 to a batch: phases begin at 10, 20, .., 90; the tenth ends too late.
    outcome = run(cluster(slots=4, batch=4, overhead=2.0, duration=101.0))
    assert begins(outcome) == [10.0 * k for k in range(1, 11)]
    assert (outcome.steps, outcome.steps_per_hour) == (9, 9 / 101 * 3600)
    assert outcome.samplers.busy == 1
    assert outcome.trainers.busy == pytest.approx(19 / 101)  # 9 steps, and 1 s of the tenth
    assert outcome.trainers.waits_for_data == pytest.approx(82 / 101)
    assert outcome.tokens.started == 4 * 101
    assert outcome.sampled_per_second == 4
    assert outcome.trained_per_second == pytest.approx(360 / 101)
    # Groups that start at 20 s have the weights of the first phase, which ended at 12 s.
    assert ages(outcome)[:3] == [[0] * 4, [1] * 4, [1] * 4]
    assert outcome.gpu_hours == pytest.approx((3 + 1) * 101 / 3600)
    assert outcome.cost == pytest.approx((3 * 2.0 + 1 * 5.0) * 101 / 3600)


def test_a_slow_trainer_sets_the_pace_and_a_full_queue_stops_the_samplers():
    # 1 s a rollout, 10 s a step, one may wait. Rollout 0 is taken at 1; 1 waits from 2 on, and 2
    # was begun before, at 1, so that is the last until the trainer takes rollout 1 at 11.
    outcome = run(cluster(tokens=1, overhead=10.0, queue_depth=1, duration=101.0))
    assert begins(outcome) == [1.0 + 10 * k for k in range(10)]
    assert outcome.steps == 10
    # Rollout k > 2 begins when rollout k - 1 is taken, with the weights of k - 1 steps.
    assert ages(outcome) == [[0], [1]] + [[1]] * 8
    assert outcome.trainers.busy == pytest.approx(100 / 101)
    assert outcome.samplers.busy == pytest.approx(11 / 101)
    assert outcome.samplers.waits_for_queue == pytest.approx(90 / 101)


def test_a_group_is_as_slow_as_its_slowest_completion():
    # Two slots, groups of two with 1 and 9 tokens: the second slot is busy until 9.
    class Alternating:
        def draw(self, random, count):
            return np.tile([1, 9], count // 2)

    made = cluster(slots=2, group_size=2, lengths=Alternating(), duration=12.0)
    outcome = run(made)
    # Slot 0: 1 (0-1), then group 1's 1 (1-2), its 9 (2-11). Slot 1: 9 (0-9), group 2's 1 (9-10).
    assert begins(outcome) == [9.0, 11.0]
    assert outcome.in_flight.mean_seconds * outcome.rollouts.started == pytest.approx(
        9 + 10 + (12 - 9) + (12 - 11)
    )


def test_the_slowest_trainer_counts():
    # Completions of 30, 10, 20, 10 tokens are dealt 0, 1, 0, 1: 50 and 20 tokens, 5 s and 2 s.
    class Long:
        def draw(self, random, count):
            return np.tile([30, 10, 20, 10], count // 4)

    trainers = Trainers(count=2, tokens_per_second=10.0, overhead=1.0)
    made = cluster(slots=4, group_size=4, trainers=trainers, lengths=Long(), duration=36.0)
    outcome = run(made)
    first = outcome.phases[0]
    assert (first.begin, first.end) == (30.0, 36.0)
    assert outcome.trainers.busy == pytest.approx((6 + 3) / 72)
    assert outcome.trainers.waits_for_slowest == pytest.approx(3 / 72)


def test_a_trainer_waits_for_weights_that_are_sent():
    # 8 bytes at 4 bytes/s and 1 s of latency: 3 s, in which the trainer takes nothing.
    sync = WeightSync(parameters=4, bits=16, bandwidth=4, latency=1)
    blocked = run(cluster(tokens=1, slots=5, overhead=2.0, weights=sync, duration=21.0))
    assert begins(blocked) == [1.0, 6.0, 11.0, 16.0]
    assert blocked.trainers.waits_for_weights == pytest.approx(12 / 21)
    free = run(
        cluster(
            tokens=1, slots=5, overhead=2.0, weights=replace(sync, blocks_trainer=False), duration=9
        )
    )
    assert begins(free) == [1.0, 3.0, 5.0, 7.0]
    assert free.trainers.waits_for_weights == 0


def test_weights_that_are_overtaken_are_not_sent():
    # Steps end at 3, 5, 7, 9, ..; a sync takes 5 s: that of 3 ends at 8, and is followed by version
    # 3, which was made at 7 and arrives at 13; version 2 is never sent.
    sync = WeightSync(parameters=0, latency=5, blocks_trainer=False)
    outcome = run(cluster(tokens=1, overhead=2.0, weights=sync, duration=20.0, queue_depth=1))
    sampled_by = [phase.version - age for phase in outcome.phases for age, _ in phase.ages]
    assert sorted(set(sampled_by)) == [0, 1, 3]


def test_completions_that_change_weights_in_mid_flight():
    # A completion of 10 tokens at 1/s is taken at 10, 20, ..; steps take 3 s. The sync at 13 finds
    # the one from 10 to 20 with 3 tokens of version 0; 7 of version 1 follow.
    made = cluster(overhead=3.0, in_flight_update=True, duration=24.0)
    outcome = run(made)
    assert [(p.ages, p.mean_age) for p in outcome.phases] == [
        (((0, 1),), 0.0),
        (((1, 1),), pytest.approx(0.3)),
    ]
    assert outcome.token_staleness.counts == ((0, 17), (1, 3))
    whole = run(replace(made, in_flight_update=False))
    assert whole.token_staleness.counts == ((0, 10), (1, 10))


def test_reading_the_prefix_again_takes_time():
    # As before, but the 3 tokens are read at 2 a second: the completion ends at 21.5.
    pool = Samplers(slots=1, tokens_per_second=1.0, prefill_tokens_per_second=2.0)
    made = cluster(samplers=(pool,), overhead=3.0, in_flight_update=True, duration=24.0)
    outcome = run(made)
    assert begins(outcome) == [10.0, 21.5]
    assert outcome.samplers.rereading == pytest.approx(1.5 / 24)
    assert outcome.tokens.running == 2  # 2.5 s of the third
    assert run(replace(made, duration=14.0)).tokens.running == 3, "it samples while it reads"


def test_a_sync_while_the_prefix_is_read_makes_it_start_over():
    # A fast slot makes the versions: it ends a completion each second, so syncs are at 2, 3, 4, ..
    # The slow one has 20 tokens at 2 s, and reads them in 2.5 s: it starts over every second.
    slow = Samplers(slots=1, tokens_per_second=10.0, prefill_tokens_per_second=8.0)
    fast = Samplers(slots=1, tokens_per_second=100.0, prefill_tokens_per_second=1e9)
    made = cluster(
        samplers=(slow, fast), tokens=100, overhead=1.0, in_flight_update=True, duration=9.0
    )
    outcome = run(made)
    assert outcome.tokens.running == 20
    assert outcome.samplers.busy_by_pool == (1.0, 1.0)


def test_a_full_queue_that_drops_its_oldest():
    # A rollout a second, a step of 3.5 s, two may wait. 0 is taken at 1; 1 to 3 come at 2 to 4, so
    # 1 is dropped; 2 is taken at 4.5. 4 to 7 come at 5 to 8: 3 and 4 are dropped for 5 and 6. At
    # 8 the trainer is free and takes 5 (begun at 5, with the weights of 4.5), so 7 has room.
    made = cluster(tokens=1, overhead=3.5, queue_depth=2, when_full="drop_oldest", duration=8.5)
    outcome = run(made)
    assert begins(outcome) == [1.0, 4.5, 8.0]
    assert [phase.discarded for phase in outcome.phases] == [0, 1, 2]
    assert ages(outcome) == [[0], [1], [1]]
    assert (outcome.rollouts.queued, outcome.queue.most) == (2, 2)
    assert outcome.samplers.waits_for_queue == 0
    assert outcome.rollouts.discarded_share == pytest.approx(3 / 6)


def test_a_synchronous_cluster_takes_turns():
    # 3 slots, batches of 2: 10 s of sampling, 4 of training, 1 of sending; the third slot idles.
    sync = WeightSync(parameters=0, latency=1)
    made = cluster(slots=3, batch=2, overhead=4.0, max_staleness=0, weights=sync, duration=60.0)
    outcome = run(made)
    assert begins(outcome) == [10.0, 25.0, 40.0, 55.0]
    assert outcome.staleness.largest == 0
    assert outcome.rollouts.discarded == 0
    assert outcome.samplers.busy == pytest.approx(2 * 40 / 180)
    assert outcome.samplers.waits_for_weights == pytest.approx(1 - 2 * 40 / 180)


def test_pools_of_different_speed():
    fast = Samplers(slots=1, tokens_per_second=10.0)
    slow = Samplers(slots=2, tokens_per_second=2.0)
    outcome = run(cluster(samplers=(fast, slow), overhead=0.1, duration=50.0, queue_depth=None))
    assert outcome.tokens.started == 50 * 10 + 2 * 50 * 2
    assert outcome.rollouts.started == 50 + 2 * 10
    assert outcome.samplers.busy_by_pool == (1.0, 1.0)


def test_updates_on_one_batch_age_it():
    outcome = run(cluster(updates=3, overhead=1.0, floor=0.01, steps=6, duration=None))
    assert begins(outcome) == [10.0, 20.0]
    assert [phase.end for phase in outcome.phases] == [13.0, 23.0]
    assert (outcome.seconds, outcome.stopped, outcome.steps) == (23.0, "steps", 6)
    assert ages(outcome) == [[0], [3]]
    learning = Cluster().learning
    expected = [
        learning.staleness_scale * age**learning.staleness_power + 0.01
        for age in (0, 1, 2, 3, 4, 5)
    ]
    assert outcome.learned.mismatch == pytest.approx(expected)


def test_a_target_is_reached_at_the_end_of_a_step():
    made = cluster(overhead=1.0, target_reward=0.5, duration=400.0)
    target = run(made).target
    rewards = run(made).learned.reward
    assert rewards[target.steps - 2] < 0.5 <= rewards[target.steps - 1]
    assert target.hours == pytest.approx((10 * target.steps + 1) / 3600)
    assert target.gpu_hours == pytest.approx(4 * target.hours)
    assert target.cost == pytest.approx(11 * target.hours)
    beyond = run(replace(made, target_reward=0.95)).target
    assert (beyond.steps, beyond.hours, beyond.cost) == (None, None, None)
    assert run(replace(made, target_reward=None)).target is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"duration": 35.0}, "the reward ends at 0.5.*; raise duration"),
        ({"target_reward": 0.9}, "no policy gets beyond 0.88; lower target_reward"),
        ({"floor": 0.5, "duration": 3600.0}, "the drift diverges at step .*; lower max_staleness"),
        ({"duration": 5.0}, "there is no optimizer step"),
    ],
)
def test_a_target_that_is_not_reached(changes, says):
    outcome = run(cluster(**{"target_reward": 0.8, **changes}))
    assert outcome.target.steps is None
    assert re.search(says, outcome.target.why_not)


def test_the_outcome_is_plain():
    outcome = run(cluster(slots=3, duration=60.0, target_reward=0.46))
    text = json.dumps(asdict(outcome), allow_nan=False)
    assert json.loads(text)["rollouts"] == asdict(outcome.rollouts)


def test_a_synchronous_run_of_our_own_trainer():
    outcome = run(from_asynchrony(groups=4, phases=5, max_staleness=0, updates=2))
    assert begins(outcome) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert (outcome.steps, outcome.seconds, outcome.staleness.largest) == (10, 10.0, 0)
    assert outcome.rollouts.started == 4 * 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"duration": 9.0}, "0 rollouts are finished in 9 s, and a batch has 1"),
        ({"batch": 20}, "10 rollouts are finished in 100 s, and a batch has 20"),
        ({"overhead": 1000.0}, "begins at 10 s and lasts 1000 s, and the run ends at 100 s"),
        ({"lengths": Empirical(values=(9000,))}, "0 rollouts are finished"),
    ],
)
def test_a_cluster_without_a_step_says_why(changes, says):
    outcome = run(cluster(**changes))
    assert outcome.steps == 0
    assert says in outcome.why_no_step
    assert outcome.learned.reward == ()


def test_a_run_without_end_is_cut(monkeypatch):
    monkeypatch.setattr("lightning_qrl.simulator.cluster.system.COMPLETIONS", 50)
    monkeypatch.setattr("lightning_qrl.simulator.cluster.measure.COMPLETIONS", 50)
    outcome = run(cluster(duration=None, steps=10**5))
    assert outcome.stopped == "completions"
    assert outcome.rollouts.started == 50
    assert any("stopped after 50 completions" in note for note in outcome.notes)


def test_a_cap_that_nothing_reaches_is_noted():
    assert run(cluster(max_staleness=1)).notes == (TOY,)
    note, toy = run(cluster(max_staleness=9)).notes
    assert "max_staleness=9 was never reached: the oldest rollout was 1" in note
    assert toy == TOY
    assert run(cluster(max_staleness=9, duration=9.0)).notes == ()  # no phase, no step
    of = replace(POST.learning, gain=5.0)
    assert TOY not in run(cluster(learning=of)).notes


def test_every_setting_is_tried_on_the_same_work():
    slow = run(cluster(lengths=Lognormal(), speed=100.0, duration=2000.0))
    fast = run(cluster(lengths=Lognormal(), speed=300.0, overhead=9.0, duration=2000.0))
    tokens = [phase.tokens for phase in slow.phases]
    assert len(set(tokens)) > 50
    assert [phase.tokens for phase in fast.phases][: len(tokens)] == tokens
