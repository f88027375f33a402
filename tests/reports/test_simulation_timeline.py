"""The timeline of a simulated run, character by character."""

import math

import pytest

from lightning_qrl.reports.simulation_timeline import (
    ASCII,
    BLOCKS,
    LABEL,
    glyphs_for,
    legend,
    timeline,
)
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings
from lightning_qrl.simulator.trace import Broadcast, Rollout, Step, Trace


def rollout(sampler, start, end, versions, fate="running", left=None):
    mean = sum(version for _, version in versions) / len(versions)
    return Rollout(sampler, start, end, None, tuple(versions), mean, fate, left, None)


def step(start, end, version, drift, reward):
    return Step(start, end, version, (0.0,), 0.0, 0.0, 0.0, 0.0, 0.0, drift, 0.0, reward)


def trace(**changed):
    """20 units of time; drawn in 10 columns, a column is 2 of them."""
    rollouts = (
        rollout(0, 0, 4, [(0, 0)], "consumed", 4),
        rollout(0, 4, 9, [(4, 0)], "discarded", 14),
        rollout(0, 10, 20, [(10, 1), (15, 2)]),
        rollout(1, 2, 6, [(2, 0)], "consumed", 8),
        rollout(1, 16, 17, [(16, 12)], "queued"),
    )
    values = {
        "settings": Settings(samplers=2, batch=1),
        "duration": 20.0,
        "floor": 0.02,
        "rollouts": rollouts,
        "steps": (step(4, 8, 0, 1.1, 0.5), step(8, 12, 1, 2.2, 0.1)),
        "broadcasts": (),
        "diverged_at_step": 1,
        "final_reward": 0.1,
        "final_drift": 2.2,
        "mean_staleness": 0.0,
        "discarded": 1,
        "sampler_utilization": 0.0,
        "trainer_utilization": 0.0,
        "why_no_step": None,
    }
    return Trace(**{**values, **changed})


def drawn(of, glyphs=BLOCKS, columns=10):
    lines = timeline(of, LABEL + columns, glyphs)
    assert all(len(line.plain) == LABEL + columns for line in lines)
    return [(line.plain[:LABEL].rstrip(), line.plain[LABEL:]) for line in lines]


def test_every_character():
    assert drawn(trace()) == [
        ("time", "0         "),
        ("trainer", "··0━1!····"),
        ("weights", "    1 2   "),
        ("sampler 0", "0━0xx1━2━━"),
        ("sampler 1", "·0━·····2·"),
        ("discarded", "       1  "),
        ("drift", "  ▅▅██████"),
        ("reward", "  ▅▅▂▂▂▂▂▂"),
    ]


def test_every_character_in_ascii():
    assert drawn(trace(), ASCII)[1:] == [
        ("trainer", "..0-1!...."),
        ("weights", "    1 2   "),
        ("sampler 0", "0-0xx1-2--"),
        ("sampler 1", ".0-.....2."),
        ("discarded", "       1  "),
        ("drift", "  ++@@@@@@"),
        ("reward", "  ++::::::"),
    ]


def test_broadcasts_are_when_weights_move():
    settings = Settings(samplers=2, batch=1, weight_sync=True)
    sent = (Broadcast(8, 11, 1), Broadcast(18, 23, 2))
    of = trace(settings=settings, broadcasts=sent, diverged_at_step=None, discarded=0)
    lines = dict(drawn(of))
    assert lines["weights"] == "    1━   2"
    assert lines["trainer"] == "··0━1━····"
    assert "discarded" not in lines


def test_a_step_goes_no_further_than_the_run():
    late = trace(steps=(step(17, 25, 3, 0.0, 0.5),), diverged_at_step=None)
    lines = dict(drawn(late))
    assert lines["trainer"] == "········3━"
    assert lines["weights"] == "          "


def test_without_a_step_there_is_no_drift_to_draw():
    none = trace(steps=(), diverged_at_step=None, why_no_step="no optimizer step: ...")
    assert [label for label, _ in drawn(none)][-1] == "discarded"


def test_the_time_axis_keeps_its_distance():
    axis = drawn(trace(), columns=80)[0][1]
    assert (
        axis.rstrip()
        == "0       2       4       6       8       10      12      14      16      18"
    )
    assert [axis.index(text) * 20 / 80 for text in ("4", "10", "18")] == [4, 10, 18]


def test_many_samplers_are_counted():
    lines = timeline(simulate(Settings(samplers=40)), 80, BLOCKS)
    labels = [line.plain[:LABEL].strip() for line in lines]
    assert labels[3:19] == [f"sampler {number}" for number in range(16)]
    assert lines[19].plain.strip() == "and 24 more"


@pytest.mark.parametrize("width", [1, 30, 53, 80, 200])
@pytest.mark.parametrize("preset", PRESETS)
def test_it_fits_and_holds_what_happened(preset, width):
    of = simulate(Settings(**PRESETS[preset], weight_sync=width == 53))
    lines = dict(drawn(of, columns=max(10, width - LABEL)))
    per_column = of.duration / max(10, width - LABEL)
    thrown = sum(int(c) for c in lines.get("discarded", "").replace(" ", ""))
    assert thrown == of.discarded
    for row, of_sampler in ((f"sampler {n}", n) for n in range(4)):
        own = [r for r in of.rollouts if r.sampler == of_sampler]
        for place, character in enumerate(lines[row]):
            begin, end = place * per_column + 1e-4, (place + 1) * per_column - 1e-4
            overlap = [r for r in own if r.start < end and r.end > begin]
            assert (character == "·") == (not overlap), (row, place)
    assert all(len(line.plain) <= max(width, 22) for line in legend(of, width, BLOCKS))


def test_colours_stand_for_versions_and_for_what_is_lost():
    lines = timeline(trace(), LABEL + 10, BLOCKS)

    def style(row, place):
        spans = [s for s in lines[row].spans if s.start <= LABEL + place < s.end]
        return spans[-1].style

    assert style(3, 0) == style(4, 1) != style(3, 5)  # version 0 and 0, version 1
    assert style(3, 3) == style(1, 5) == "red"  # discarded, diverged


def test_blocks_only_where_they_can_be_encoded():
    assert glyphs_for("utf-8") is BLOCKS
    assert [glyphs_for(name) for name in ("ascii", "latin-1", "no such")] == [ASCII] * 3
    assert all(c.isascii() for c in ASCII.goes_on + ASCII.waits + ASCII.bars + ASCII.shades)
    assert math.isclose(len(ASCII.bars), len(BLOCKS.bars))
