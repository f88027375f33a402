"""The closed forms against the recursion itself, by bisection and by running it."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_qrl.simulator.closed_forms import (
    critical_dynamic,
    critical_effective,
    critical_staleness,
    fixed_points,
    mean_staleness,
    plateau,
    steady_staleness,
)
from lightning_qrl.simulator.constants import POST, Kick
from lightning_qrl.simulator.dynamics import effective, mismatch, next_drift
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import Settings


def runs_away(effective: float, steps: int = 60_000) -> bool:
    drift = 0.0
    for _ in range(steps):
        drift = next_drift(drift, effective)
        if drift > POST.learning.drift_limit:
            return True
    return False


def bisect(bad: Callable[[float], bool], low: float, high: float, turns: int = 24) -> float:
    assert not bad(low)
    assert bad(high)
    for _ in range(turns):
        middle = (low + high) / 2
        low, high = (low, middle) if bad(middle) else (middle, high)
    return high


def test_critical_effective_mismatch() -> None:
    assert round(critical_effective(), 4) == 0.0304
    found = bisect(runs_away, 0.0, 0.1)
    assert found == pytest.approx(critical_effective(), rel=1e-5)


def test_critical_dynamic_mismatch() -> None:
    assert round(critical_dynamic(), 4) == 0.0441
    found = bisect(lambda dynamic: runs_away(effective(dynamic)), 0.0, 0.1)
    assert found == pytest.approx(critical_dynamic(), rel=1e-5)
    assert effective(critical_dynamic()) == pytest.approx(critical_effective(), rel=1e-12)


def test_criticals_of_the_whole_model() -> None:
    """Synchronous, without kicks, in 3000 quick steps: the floor alone decides."""
    quick = replace(
        POST.times, tick=1.0, window=9000.0, step=0.5, rollout_least=0.1, rollout_extra_limit=0.1
    )
    never = Kick(size=0.0, probability=0.0)

    def diverges(dynamic: float) -> bool:
        base = {"bf16": dynamic / POST.learning.floor_share, "fp8": 0.0, "fp4": 0.0}
        constants = replace(
            POST,
            times=quick,
            floors=replace(POST.floors, precision=base),
            high_precision_kick=never,
            plain_kick=never,
        )
        own = Settings(precision="bf16", max_staleness=0, batch=1, horizon="short")
        trace = simulate(own, constants)
        assert trace.optimizer_steps > 2000
        assert trace.steps[0].dynamic == pytest.approx(dynamic)
        return trace.final_drift == POST.learning.drift_limit

    found = bisect(diverges, 0.01, 0.1, turns=14)
    assert found == pytest.approx(critical_dynamic(), rel=2e-3)
    assert effective(found) == pytest.approx(critical_effective(), rel=3e-3)


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.3, 0.9, 0.999])
def test_the_drift_comes_to_rest_at_the_plateau(share: float) -> None:
    e = share * critical_effective()
    drift = 0.0
    for _ in range(40_000):
        drift = next_drift(drift, e)
    assert drift == pytest.approx(plateau(e), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_the_upper_point_parts_rest_from_flight(share: float) -> None:
    e = share * critical_effective()
    points = fixed_points(e)
    assert points is not None
    for start, rests in ((points[1] * 0.99, True), (points[1] * 1.01, False)):
        drift = start
        for _ in range(2_000):
            drift = min(next_drift(drift, e), 1e9)
        assert (drift < points[1]) is rests


def test_above_the_critical_mismatch_there_is_no_plateau() -> None:
    assert plateau(critical_effective() * (1 + 1e-9)) is None
    linear = replace(POST.learning, feedback=0.0)
    assert math.isinf(critical_effective(linear))
    assert plateau(10.0, linear) == pytest.approx(10.0 * linear.gain / linear.decay)


def test_critical_staleness() -> None:
    """At that age the batch's dynamic mismatch is the critical one; a floor can be too much."""
    for floor in (0.0103, 0.0271, 0.0543):
        age = critical_staleness(floor)
        assert mismatch([age] * 4, floor).dynamic == pytest.approx(critical_dynamic())
    assert critical_staleness(1.0) == 0


def test_a_kick_breaks_the_plateau() -> None:
    """Where it does not hold: with kicks, drift ends elsewhere than the recursion alone says."""
    trace = simulate(Settings(precision="fp4", backward="high_precision", max_staleness=0))
    assert any(step.kick for step in trace.steps)
    alone = 0.0
    for step in trace.steps:
        alone = next_drift(alone, step.effective)
    assert trace.final_drift > alone + 0.05


def test_staleness_by_hand() -> None:
    """A rollout of two steps' time, as fast as the trainer: two versions appear meanwhile."""
    assert steady_staleness(3.4, 1.7, 1.0) == pytest.approx(2.0)
    # 16 at work, 8 a batch: two batches begun before; half the trainer's time is idle
    assert mean_staleness(concurrency=16, batch=8, tail=1.0, rho=0.5, queue=1) == 2.5
    # rho = 1: both forms agree with a queue of one batch
    below = mean_staleness(concurrency=16, batch=8, tail=1.5, rho=1 - 1e-12, queue=1)
    above = mean_staleness(concurrency=16, batch=8, tail=1.5, rho=1.0, queue=1)
    assert below == pytest.approx(above)
