"""A completion that changes weights in mid-flight, against one that lives each nanosecond."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_qrl.simulator.cluster.work import Completion, Group, Syncs


def naive(start, tokens, pace, times, reading, until=10**9):
    """End, and which version each token was begun with: version k + 1 comes at times[k]."""
    sampled_by, progress, to_read, version = [], 0, 0, 0
    for now in range(start, until):
        for number, time in enumerate(times):
            if time == now and time > start:
                version = number + 1
                to_read = len(sampled_by) * reading
        if progress == tokens * pace:
            return now, sampled_by
        if to_read:
            to_read -= 1
            continue
        if progress % pace == 0:
            sampled_by.append(version)
        progress += 1
    return None, sampled_by


@given(
    start=st.integers(0, 20),
    tokens=st.integers(1, 12),
    pace=st.integers(1, 6),
    times=st.lists(st.integers(1, 150), unique=True, max_size=8).map(sorted),
    reading=st.integers(0, 4),
    asks=st.lists(st.integers(0, 300), max_size=4).map(sorted),
)
@settings(max_examples=400, deadline=None)
def test_a_completion_that_changes_weights(start, tokens, pace, times, reading, asks):
    end, sampled_by = naive(start, tokens, pace, times, reading, until=10_000)
    before = sum(time <= start for time in times)
    sampled_by = [max(version, before) for version in sampled_by]
    syncs = Syncs([0, *times], list(range(len(times) + 1)))
    work = tokens * pace
    of = Completion(Group(start, before, 1), 0, tokens, start, work, 1 + before, start)
    for now in asks:
        if start <= now <= end:
            of.change_weights(syncs, now, reading)
            _, begun = naive(start, tokens, pace, times, reading, until=now)
            assert of.sampled(now) in (len(begun), len(begun) - 1)  # the last one may be under way
    asked = -1
    while of.end > asked:  # as a sampler does: until no sync came before what was the end
        asked = of.end
        of.change_weights(syncs, asked, reading)
    assert of.end == end
    spans = [*of.spans, (of.seen - 1, tokens - of.begun)]
    assert [version for version, count in spans for _ in range(count)] == sampled_by
