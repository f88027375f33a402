"""The cluster against the schedule of our own asynchronous trainer: another implementation."""

from collections import Counter
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_qrl.asynchrony.schedule import Schedule
from lightning_qrl.asynchrony.settings import Asynchrony
from lightning_qrl.simulator.cluster import from_asynchrony, run
from lightning_qrl.simulator.cluster.asynchrony import TOKENS


@st.composite
def systems(draw):
    """Knobs, and what else decides a schedule."""
    updates, every = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    odd = draw(st.integers(0, updates - 1))
    knobs = {
        "max_staleness": updates * draw(st.integers(max(1, every - 1), 5)) + odd,
        "queue_depth": draw(st.none() | st.integers(1, 3)),
        "weight_sync_every": every,
        "completion_time": draw(st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 7.0])),
    }
    others = {"groups": draw(st.integers(1, 5)), "updates": updates}
    others["samplers"] = draw(st.integers(1, 12))
    if knobs["completion_time"]:
        knobs["in_flight_update"] = draw(st.booleans())
    return knobs, others


@given(systems())
@settings(max_examples=150, deadline=None)
def test_every_phase_is_that_of_the_schedule(system):
    knobs, others = system
    schedule = Schedule(Asynchrony(**knobs), **others, tokens=TOKENS, seed=0)
    outcome = run(from_asynchrony(phases=30, **knobs, **others))
    assert outcome.steps == 30 * others["updates"]
    for seen in outcome.phases:
        phase = schedule.next_phase()
        begun_with = phase.number * others["updates"]
        ages = Counter(begun_with - group.spans[0].version for group in phase.groups)
        assert seen.ages == tuple(sorted(ages.items()))
        assert (seen.waiting, seen.discarded) == (phase.waiting, phase.discarded)
        assert abs(seen.waited - phase.waited) < 1e-6
        old = sum(
            (begun_with - span.version) * (span.end - span.begin)
            for group in phase.groups
            for span in group.spans
        )
        assert abs(seen.mean_age - old / TOKENS / len(phase.groups)) < 1e-5


def test_with_random_times_ages_and_discards_are_distributed_alike():
    # Other draws, so other numbers. Phases depend on their neighbours, so only every 10th counts as
    # independent: a chi-squared test on the ages of the oldest group of each, and one of whether
    # anything was discarded before it.
    knobs = {"max_staleness": 4, "queue_depth": 2, "completion_time": 2.0}
    knobs["completion_time_spread"] = 0.8
    others = {"groups": 4, "samplers": 12, "updates": 1}
    schedule = Schedule(Asynchrony(**knobs), **others, tokens=TOKENS, seed=5)
    outcome = run(from_asynchrony(phases=8000, **knobs, **others))
    theirs = [schedule.next_phase() for _ in range(8000)]
    oldest = (
        [max(p.number - g.spans[0].version for g in p.groups) for p in theirs[10::10]],
        [phase.ages[-1][0] for phase in outcome.phases[10::10]],
    )
    discarded = (
        [p.discarded for p in theirs[10::10]],
        [p.discarded for p in outcome.phases[10::10]],
    )
    for ours, its in (oldest, discarded):
        values = [n for n, count in Counter(chain(ours, its)).items() if count >= 20]
        assert len(values) >= 3
        table = [[sample.count(value) for value in values] for sample in (ours, its)]
        assert stats.chi2_contingency(table).pvalue > 0.01
    share = sum(p.discarded for p in theirs) / sum(p.discarded + 4 for p in theirs)
    assert share > 0.01
    assert abs(outcome.rollouts.discarded_share - share) < 0.2 * share
