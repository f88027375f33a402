"""The reference model against the 288 outcomes of the post's simulator, and its own laws."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.dynamics import divergence_step, floor
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings
from lightning_qrl.simulator.streams import first_state, uniform
from lightning_qrl.simulator.trace import Trace

TABLE = json.loads(Path(__file__).with_name("simulator_table.json").read_text())
SET = ("horizon", "batch", "max_staleness", "weight_sync")
RANDOM = st.builds(
    Settings,
    precision=st.sampled_from(["bf16", "fp8", "fp4"]),
    backward=st.sampled_from(["high_precision", "dequantized"]),
    bf16_tail=st.booleans(),
    shared_experts=st.booleans(),
    four_over_six=st.booleans(),
    max_staleness=st.integers(0, 10),
    weight_sync=st.booleans(),
    batch=st.integers(1, 24),
    horizon=st.sampled_from(["short", "med", "long"]),
    samplers=st.integers(1, 12),
    seed=st.integers(0, 2**31 - 1),
)


def outcome(trace: Trace) -> dict[str, object]:
    """The table's columns."""
    return {
        "optimizer_steps": trace.optimizer_steps,
        "final_reward": round(trace.final_reward, 3),
        "final_drift": round(trace.final_drift, 2),
        "diverged_at_step": trace.diverged_at_step,
        "mean_staleness": round(trace.mean_staleness, 2),
        "quantization_floor": round(trace.floor, 4),
        "discarded": trace.discarded,
    }


@pytest.mark.parametrize("config", PRESETS)
def test_every_row_of_the_table(config: str) -> None:
    rows = [row for row in TABLE if row["config"] == config]
    assert len(rows) == 36
    for row in rows:
        own = Settings(**PRESETS[config], **{key: row[key] for key in SET})
        found = outcome(simulate(own))
        assert found == {key: row[key] for key in found}, row


def test_the_post_teaches_what_staleness_does() -> None:
    naive = [simulate(Settings(**PRESETS["fp4_naive"], max_staleness=cap)) for cap in range(9)]
    full = [simulate(Settings(**PRESETS["fp4_full"], max_staleness=cap)) for cap in range(9)]
    assert [trace.diverged_at_step is not None for trace in naive] == [False] * 2 + [True] * 7
    assert not any(trace.diverged_at_step is not None for trace in full)


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_rollouts_are_conserved_and_times_are_in_order(own: Settings) -> None:
    trace = simulate(own)
    fates = Counter(rollout.fate for rollout in trace.rollouts)
    assert fates["consumed"] == trace.optimizer_steps * own.batch
    assert fates["discarded"] == trace.discarded
    assert fates["running"] <= own.samplers
    assert sum(fates.values()) == len(trace.rollouts)
    for rollout in trace.rollouts:
        assert 0 <= rollout.start < rollout.end <= trace.duration
        assert (rollout.queued is None) == (rollout.fate == "running")
        assert (rollout.left is None) == (rollout.fate in ("running", "queued"))
        seen = [version for _, version in rollout.versions]
        assert seen == sorted(seen)
        assert seen[0] <= rollout.version <= seen[-1]
    ends = [step.end for step in trace.steps]
    assert all(end <= step.start + 1e-9 for end, step in zip(ends, trace.steps[1:], strict=False))
    assert [step.version for step in trace.steps] == list(range(trace.optimizer_steps))


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_ages_are_what_the_versions_say(own: Settings) -> None:
    trace = simulate(own)
    for number, step in enumerate(trace.steps):
        taken = [rollout for rollout in trace.rollouts if rollout.step == number]
        assert {rollout.left for rollout in taken} == {step.start}
        expected = sorted(step.version - rollout.version for rollout in taken)
        assert sorted(step.ages) == pytest.approx(expected)
        assert max(step.ages) <= own.max_staleness + 1e-6
        if own.max_staleness == 0:
            assert step.staleness == 0
        assert step.staleness == pytest.approx(sum(step.ages) / own.batch)


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_a_sampler_has_one_rollout_at_a_time(own: Settings) -> None:
    rollouts = simulate(own).rollouts
    for sampler in range(own.samplers):
        mine = [rollout for rollout in rollouts if rollout.sampler == sampler]
        for before, after in zip(mine, mine[1:], strict=False):
            assert before.queued is not None
            assert before.queued <= after.start


@settings(max_examples=40, deadline=None)
@given(RANDOM)
def test_utilization_is_the_busy_share_of_the_time(own: Settings) -> None:
    """Counted once more, on a fine grid of times."""
    trace = simulate(own)
    at = np.arange(0.5, 4000) / 4000 * trace.duration
    sampling = training = 0.0
    for rollout in trace.rollouts:
        end = math.inf if rollout.queued is None else rollout.queued
        sampling += ((rollout.start <= at) & (at < end)).mean() / own.samplers
    for step in trace.steps:
        training += ((step.start <= at) & (at < step.end)).mean()
    assert trace.sampler_utilization == pytest.approx(sampling, abs=0.02)
    assert trace.trainer_utilization == pytest.approx(training, abs=0.02)


def test_a_run_is_a_pure_function() -> None:
    own = Settings(precision="fp4", weight_sync=True, max_staleness=4)
    assert simulate(own) == simulate(own)


def test_the_generator_is_the_one_of_numerical_recipes() -> None:
    stream = uniform(0)
    drawn = [int(next(stream) * 2**32) for _ in range(3)]
    assert drawn == [0x3C6EF35F, 0x47502932, 0xD1CCF6E9]  # the book's own check


def test_seeds_are_independent_runs() -> None:
    """First draws of 1000 seeds: uniform, and unrelated between seeds and streams (4 sigma)."""
    seeds = range(1, 1001)
    drawn = np.array([[next(uniform(first_state(own, s))) for s in seeds] for own in POST.seeds])
    assert np.abs(drawn.mean(axis=1) - 0.5).max() < 4 / math.sqrt(12 * 1000)
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 4 / math.sqrt(1000)
    for stream in drawn:
        assert abs(np.corrcoef(stream[1:], stream[:-1])[0, 1]) < 4 / math.sqrt(1000)
    assert [first_state(own, 0) for own in POST.seeds] == [97, 41, 13]


def test_a_run_without_a_step_says_why() -> None:
    trace = simulate(Settings(precision="bf16", batch=512, horizon="long"))
    assert trace.optimizer_steps == 0
    assert trace.final_reward == POST.learning.reward_start
    ended = sum(rollout.fate == "queued" for rollout in trace.rollouts)
    assert trace.why_no_step is not None
    assert f"{ended} rollouts end in 98 units of time" in trace.why_no_step
    assert "a batch has 512" in trace.why_no_step


def test_divergence_is_the_start_of_the_last_unbroken_stretch() -> None:
    assert divergence_step([]) is None
    assert divergence_step([3.0, 2.0]) is None
    assert divergence_step([3.0, 2.0, 2.3, 2.2, 2.3, 9.0]) == 4
    assert divergence_step([2.3, 2.3]) == 0


@pytest.mark.parametrize(
    ("preset", "published"),
    [("bf16", 0.0103), ("fp8_dq", 0.0203), ("fp4_46_dq_tail", 0.0313), ("fp4_naive", 0.0543)],
)
def test_floors(preset: str, published: float) -> None:
    """Those with the tail in BF16 are the post's measurements themselves."""
    assert floor(Settings(**PRESETS[preset])) == pytest.approx(published, abs=1e-12)


def test_other_constants_are_another_model() -> None:
    times = replace(POST.times, step=3.4)
    slow = simulate(Settings(), replace(POST, times=times))
    assert slow.steps[0].end - slow.steps[0].start == pytest.approx(3.4 * 0.837)
    assert slow.optimizer_steps < simulate(Settings()).optimizer_steps
    assert Constants() == POST


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"precision": "fp6"}, "precision is bf16 or fp8 or fp4, got fp6"),
        ({"samplers": 0}, "samplers must be at least 1 and at most 1024, got 0"),
        ({"batch": 0}, "batch must be at least 1 and at most 1024, got 0"),
        ({"max_staleness": -1}, "max_staleness must be at least 0"),
        ({"max_staleness": 1.5}, "max_staleness is a whole number, got 1.5"),
        ({"max_staleness": True}, "max_staleness is a whole number, got true"),
        ({"weight_sync": 1}, "weight_sync is true or false, got 1"),
        ({"horizon": ["med"]}, "horizon is short or med or long"),
    ],
)
def test_impossible_settings_are_one_line(own: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=line) as error:
        Settings(**own)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
