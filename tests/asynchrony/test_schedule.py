"""The schedule against timelines by hand, and what holds of every schedule."""

import contextlib
import itertools
import math
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_qrl.asynchrony.schedule import Schedule, check_reach
from lightning_qrl.asynchrony.settings import Asynchrony

T = 8  # tokens


def schedule(groups=2, samplers=None, updates=1, seed=0, **knobs):
    return Schedule(
        Asynchrony(**knobs),
        groups=groups,
        samplers=samplers or groups,
        updates=updates,
        tokens=T,
        seed=seed,
    )


def phases(count, **knobs):
    made = schedule(**knobs)
    return [made.window(number)[0] for number in range(count)]


def lags(made, updates=1):
    """How many versions behind each group of each phase is, by its first token."""
    return [[p.number * updates - g.spans[0].version for g in p.groups] for p in made]


def numbers(made):
    return [group.number for phase in made for group in phase.groups]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_without_completion_times_the_lag_is_the_depth_of_the_queue(depth):
    made = phases(9, max_staleness=depth, queue_depth=depth)
    assert lags(made) == [[min(k, depth)] * 2 for k in range(9)]
    assert numbers(made) == list(range(18))
    assert [(p.waited, p.discarded) for p in made] == [(0, 0)] * 9
    assert [p.waiting for p in made] == [2] + [2 * depth] * 8  # at the very start the first two


def test_a_phase_of_several_updates_counts_as_several_versions():
    made = phases(5, updates=3, max_staleness=7)  # so the queue holds 7 // 3 rollouts
    assert lags(made, updates=3) == [[0, 0], [3, 3], [6, 6], [6, 6], [6, 6]]


def test_weights_that_are_synced_every_other_phase():
    # samplers have v0 in the phases 0 and 1, v2 in 2 and 3, ..: trained one phase later
    made = phases(7, max_staleness=2, queue_depth=1, weight_sync_every=2)
    versions = [[group.spans[0].version for group in phase.groups] for phase in made]
    assert versions == [[0, 0], [0, 0], [0, 0], [2, 2], [2, 2], [4, 4], [4, 4]]


def test_the_trainer_waits_for_samplers_that_are_too_slow():
    # one sampler, 1.5 a group; 2 groups a phase: finished at 1.5, 3, 4.5, 6, 7.5, 9
    made = phases(3, samplers=1, max_staleness=4, completion_time=1.5)
    assert [p.waited for p in made] == [3.0, 2.0, 2.0]  # phases begin at 3, 6, 9
    # starts at 0, 1.5; at 3 (of version 0), 4.5 (1); at 6 (1) and 7.5 (2)
    assert lags(made) == [[0, 0], [1, 0], [1, 0]]


def test_weights_that_change_in_mid_completion():
    # Four samplers, 2 a group, 2 groups a phase, one rollout may wait. Groups 0 to 3 are at work
    # until 2, when phase 0 takes 0 and 1 while 2 and 3 wait. Phase 0 ends at 3: phase 1 takes 2 and
    # 3, and groups 4 to 7 start with v1, until 5. Phase 1 ends at 4, when half of their time is
    # over: tokens 4 to 7 are of v2. Phase 2 takes 4 and 5 at 5, and phase 3, at 6, takes 6 and 7.
    knobs = {"samplers": 4, "max_staleness": 2, "queue_depth": 1, "completion_time": 2.0}
    made = phases(4, in_flight_update=True, **knobs)
    seen = [[(s.version, s.begin, s.end) for s in g.spans] for p in made for g in p.groups]
    assert seen == [[(0, 0, 8)]] * 4 + [[(1, 0, 4), (2, 4, 8)]] * 4
    assert numbers(made) == list(range(8))
    assert [p.waited for p in made] == [2.0, 0.0, 1.0, 0.0]
    whole = phases(4, **knobs)
    assert [g.spans[0].version for p in whole for g in p.groups] == [0] * 4 + [1] * 4
    assert all(len(g.spans) == 1 for p in whole for g in p.groups)


def test_a_group_that_is_too_old_is_discarded_and_its_prompt_sampled_again(monkeypatch):
    # Group 1 takes 3.5, all others 1. Two samplers, one group a phase, staleness at most 2.
    # t=1: group 0 done, phase 0 takes it. t=2: phase 1 takes group 2 (started at 1 with v0);
    # t=3: phase 2 takes group 3 (at 2, v1); 3.5: group 1 done, of v0; t=4: it is 3 versions old, so
    # phase 3 discards it and takes group 4 (at 3, v2).
    def duration(self, number, attempt):
        return 3_500_000 if (number, attempt) == (1, 0) else 1_000_000

    monkeypatch.setattr(Schedule, "_duration", duration)
    made = phases(7, groups=1, samplers=2, max_staleness=2, queue_depth=2, completion_time=1.0)
    assert numbers(made)[:4] == [0, 2, 3, 4]
    assert [p.discarded for p in made[:4]] == [0, 0, 0, 1]
    assert lags(made)[:4] == [[0], [1], [1], [1]]
    assert 1 in numbers(made[4:]), "the prompt is lost"


def test_a_long_time_has_the_mean_and_the_spread_it_was_given():
    made = schedule(max_staleness=9, completion_time=2.0, completion_time_spread=0.5)
    times = [made._duration(number, 0) / 1e6 for number in range(4000)]
    mean = statistics.fmean(times)
    assert mean == pytest.approx(2.0, abs=4 * 1.0 / math.sqrt(4000))
    assert statistics.stdev(times) / mean == pytest.approx(0.5, rel=0.1)
    assert made._duration(0, 1) != made._duration(0, 0)


KNOBS = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 4),
        "samplers": st.integers(1, 9),
        "updates": st.integers(1, 3),
        "seed": st.integers(0, 99),
        "phases_behind": st.integers(1, 4),
        "queue_depth": st.integers(1, 4),
        "weight_sync_every": st.integers(1, 3),
        "in_flight_update": st.booleans(),
        "completion_time": st.floats(0.001, 9),
        "completion_time_spread": st.floats(0, 2),
    }
)


@given(KNOBS)
@settings(max_examples=50, deadline=None)
def test_what_holds_of_every_schedule(knobs):
    behind, updates = knobs.pop("phases_behind"), knobs["updates"]
    behind = max(behind, knobs["weight_sync_every"] - 1)
    knobs["max_staleness"] = behind * updates
    made = phases(20, **knobs)  # it ends: no deadlock
    assert [len(phase.groups) for phase in made] == [knobs["groups"]] * 20
    assert all(0 <= lag <= behind * updates for row in lags(made, updates) for lag in row)
    shown = numbers(made)
    assert len(set(shown)) == len(shown), "a prompt was trained on twice"
    assert all(phase.waited >= 0 and phase.waiting >= len(phase.groups) for phase in made)
    for group in itertools.chain.from_iterable(phase.groups for phase in made):
        assert [s.begin for s in group.spans] == [0, *(s.end for s in group.spans[:-1])]
        assert group.spans[-1].end == T
        versions = [s.version for s in group.spans]
        assert versions == sorted(set(versions))
        assert all(v % (updates * knobs["weight_sync_every"]) == 0 for v in versions)


@given(KNOBS)
@settings(max_examples=20, deadline=None)
def test_no_prompt_is_lost_and_all_that_is_sampled_is_trained_on(knobs):
    knobs |= {"max_staleness": 2 * knobs.pop("phases_behind") * knobs["updates"]}
    knobs["weight_sync_every"] = 1
    made = schedule(**knobs)
    sampled, taken = {}, []
    for number in range(30):
        for group, span in made.work(number):
            assert span.version == number * knobs["updates"]
            assert sampled.get(group.number, 0) == span.begin, "a token is missing"
            sampled[group.number] = span.end
        for group in made.window(number)[0].groups:
            assert sampled.pop(group.number) == T
            taken.append(group.number)
    assert len(sampled) <= (made.reach + 1) * knobs["groups"]
    at_work = {g.number for g in (*made._running, *made._queue)} | {n for n, _ in made._returned}
    ahead = {g.number for phase in made.window(29)[1:] for g in phase.groups}
    assert set(taken) | at_work | ahead == set(range(made._numbers))


def test_a_schedule_may_be_read_from_the_middle():
    knobs = {"max_staleness": 3, "completion_time": 1.0, "completion_time_spread": 1.0}
    assert schedule(**knobs).window(7) == [*phases(11, **knobs)][7:]


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"max_staleness": -1}, "max_staleness must be at least 0"),
        ({"max_staleness": 2, "queue_depth": 0}, "queue_depth must be at least 1"),
        ({"max_staleness": 2, "weight_sync_every": 0}, "weight_sync_every must be at least 1"),
        ({"max_staleness": 2, "samplers": 0}, "samplers must be at least 1"),
        ({"max_staleness": 2, "completion_time": -1.0}, "completion_time must be at least 0"),
        ({"max_staleness": 2, "completion_time": math.nan}, "completion_time must be at least 0"),
        ({"max_staleness": 4, "completion_time": 1e308}, "time must be .* at most 1000000, got"),
        (
            {"max_staleness": 4, "completion_time": 1.0, "completion_time_spread": 1e200},
            "completion_time_spread must be .* at most 10, got 1e.200",
        ),
        ({"max_staleness": 2, "queue_depth": 10**6}, "queue_depth must be .* at most 1000"),
        ({"max_staleness": 2, "weight_sync_every": 10**6}, "weight_sync_every must be .* 1000"),
        (
            {"max_staleness": 2, "completion_time": 1.0, "samplers": 10**8},
            "samplers must be .* at most 10000",
        ),
        ({"queue_depth": 2}, "queue_depth does nothing with max_staleness=0"),
        ({"weight_sync_every": 2}, "weight_sync_every does nothing with max_staleness=0"),
        ({"in_flight_update": True}, "in_flight_update does nothing with max_staleness=0"),
        ({"completion_time": 1.0}, "completion_time does nothing with max_staleness=0"),
        ({"max_staleness": 2, "in_flight_update": True}, "nothing with completion_time=0"),
        ({"max_staleness": 2, "samplers": 3}, "samplers does nothing with completion_time=0"),
    ],
)
def test_knobs_that_mean_nothing(knobs, says):
    with pytest.raises(ValueError, match=says):
        Asynchrony(**knobs)


@pytest.mark.parametrize(
    ("knobs", "updates", "says"),
    [
        ({"max_staleness": 2}, 3, "less than the 3 updates on one rollout"),
        ({"max_staleness": 2, "weight_sync_every": 4}, 1, "weights that are 3 versions old"),
        ({"max_staleness": 8, "queue_depth": 3}, 1, "out of reach: .* is 3 versions old"),
        ({"max_staleness": 5}, 2, "out of reach: .* set max_staleness=4"),
        ({"max_staleness": 8, "completion_time": 0.5, "queue_depth": 1}, 1, "out of reach"),
        ({"max_staleness": 10**6}, 4, "more than 1000 rollouts of 4 updates; .* at most 4000"),
        (
            {"max_staleness": 100, "queue_depth": 1, "completion_time": 0.001}
            | {"completion_time_spread": 0.01},
            1,
            "the oldest group of the first 600 rollouts is 2 versions old",
        ),
    ],
)
def test_what_the_queue_cannot_reach(knobs, updates, says):
    with pytest.raises(ValueError, match=says):
        check_reach(Asynchrony(**knobs), groups=4, updates=updates)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"max_staleness": 1},
        {"max_staleness": 8},
        {"max_staleness": 3, "queue_depth": 2, "weight_sync_every": 2},
        {"max_staleness": 8, "queue_depth": 1, "completion_time": 1.0, "completion_time_spread": 1},
        {"max_staleness": 3, "queue_depth": 2, "completion_time": 1.5, "samplers": 9},
        {"max_staleness": 2, "queue_depth": 1000},
    ],
)
def test_what_it_can(knobs):
    check_reach(Asynchrony(**knobs), groups=4, updates=1)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_the_reach_without_completion_times_is_that_of_the_schedule(behind, depth, every, updates):
    knobs = Asynchrony(
        max_staleness=behind * updates, queue_depth=depth, weight_sync_every=min(every, behind + 1)
    )
    made = Schedule(knobs, groups=2, samplers=2, updates=updates, tokens=T, seed=0)
    oldest = max(
        itertools.chain.from_iterable(lags((made.window(n)[0] for n in range(40)), updates))
    )
    if oldest == knobs.max_staleness:
        check_reach(knobs, groups=2, updates=updates)
    else:
        with pytest.raises(ValueError, match=f"oldest group of all is {oldest} versions old"):
            check_reach(knobs, groups=2, updates=updates)


LARGE = {"max_staleness": 1000, "completion_time": 0.5}


@pytest.mark.parametrize(
    ("groups", "knobs"),
    [
        (16, LARGE | {"samplers": 10_000, "in_flight_update": True}),
        (16, LARGE | {"samplers": 10_000, "weight_sync_every": 1000}),
        (16, LARGE | {"completion_time_spread": 10}),
        (5000, LARGE | {"max_staleness": 9, "queue_depth": 1, "completion_time_spread": 0.1}),
    ],
)
def test_the_largest_schedules_are_tried_in_no_time(groups, knobs):
    began = time.process_time()
    with contextlib.suppress(ValueError):
        check_reach(Asynchrony(**knobs), groups=groups, updates=1)
    assert time.process_time() - began < 2
