"""Each measure in closed form."""

import math

import numpy as np
import pytest
from recorded import learning

from lightning_qrl.reports.measures import Goal, default_goal, further, standard
from lightning_qrl.tracking.notebook import History


def series(values, steps=None) -> History:
    return History(np.arange(len(values)) if steps is None else np.array(steps), np.array(values))


def measured(metrics, goal=None, rules=None) -> dict[str, float | None]:
    rules = standard(metrics, goal) if rules is None else rules
    return {rule.measure.key: rule.of(metrics[rule.metric]) for rule in rules}


def test_rewards():
    metrics = {"eval/reward": series([0.0, 0.4, 0.6], [0, 10, 40])}
    found = measured(metrics, Goal(0.4, ""))
    assert found["held_out_reward"] == 0.6
    assert found["reward_area"] == pytest.approx((0.2 * 10 + 0.5 * 30) / 40)
    assert found["steps_to_threshold"] == 10
    assert measured(metrics, Goal(0.0, ""))["steps_to_threshold"] == 0
    assert measured(metrics, Goal(0.7, ""))["steps_to_threshold"] is None
    assert "steps_to_threshold" not in measured(metrics)
    once = {"eval/reward": series([0.3], [5])}
    assert measured(once)["reward_area"] == 0.3


def test_without_evaluation_the_area_is_under_the_training_curve_and_says_so():
    metrics = {"train/reward": series([0.0, 1.0, 1.0])}
    (rule,) = standard(metrics, Goal(0.5, ""))
    assert rule.measure.label == "area under the training curve"
    assert measured(metrics)["reward_area"] == 0.75


def test_health_and_cost():
    norms = [1.0, 1.0, 3.0, 3.1, math.nan, math.inf, 1.0]
    entropy = np.linspace(1, 0, 20)
    found = measured(
        {
            "train/sampling/sampling_logp_difference/mean": series([0.01, 0.03]),
            "rollout_corr/ess_token": series([1.0, 0.5]),
            "train/grad_norm": series(norms),
            "train/entropy": series(entropy),
            "train/tokens_per_second": series([1.0, 9.0, 100.0]),
            "perf/max_memory_rss_gb": series([1.0, 3.0, 2.0]),
        }
    )
    assert found["mismatch"] == pytest.approx(0.02)
    assert found["ess"] == 0.75
    assert found["spikes"] == 3  # the median of the finite ones is 1: 3.1, and those not finite
    assert found["largest_grad_norm"] == math.inf
    assert found["final_entropy"] == pytest.approx(entropy[-2:].mean())
    assert found["tokens_per_second"] == 9
    assert found["peak_memory"] == 3


def test_where_most_norms_are_zero_a_spike_is_still_above_the_usual_ones():
    norms = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.1, 3.5]
    assert measured({"train/grad_norm": series(norms)})["spikes"] == 1
    assert measured({"train/grad_norm": series([0.0, 0.0])})["spikes"] == 0


def test_an_infinite_reward_reaches_nothing():
    metrics = {"eval/reward": series([0.0, math.inf, 0.6])}
    assert measured(metrics, Goal(0.5, ""))["steps_to_threshold"] == 2
    histories = [metrics["eval/reward"], series([0.0, math.inf])]
    assert default_goal(histories).reward == pytest.approx(0.54)


def test_memory_of_the_gpu_goes_before_that_of_the_process():
    metrics = {"perf/max_memory_rss_gb": series([9.0]), "perf/max_memory_allocated_gb": series([2])}
    assert measured(metrics) == {"peak_memory": 2}


def test_any_other_metric():
    found = measured({"quant/x": series([1.0, 2.0, 6.0])}, rules=further("quant/x"))
    assert found == {"quant/x/last": 6.0, "quant/x/mean": 3.0}


def test_the_default_goal_is_most_of_what_the_baseline_gains():
    histories = [series([0.0, 0.9, 1.0]), series([0.2, 0.1, 0.8])]
    assert default_goal(histories).reward == pytest.approx(0.1 + 0.9 * 0.8)
    assert default_goal([series([0.5, 0.4])]) is None
    assert default_goal([series([math.nan, 0.4])]) is None
    assert default_goal([]) is None


def test_every_standard_measure_is_found_in_a_run():
    assert all(value is not None for value in measured(learning(0), Goal(0.5, "")).values())
    assert len(measured(learning(0), Goal(0.5, ""))) == 10
