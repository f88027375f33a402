"""What the page says in words and tables."""

from dataclasses import replace

import pytest
from comparisons import MEASURES, ablation, comparison_of

from lightning_qrl.reports.comparison import Difference
from lightning_qrl.reports.numbers import difference_text, value_text
from lightning_qrl.reports.page import tables
from lightning_qrl.reports.page.words import result, verdict, when

REWARD, MISMATCH, ENTROPY = MEASURES[0], MEASURES[2], MEASURES[5]
NAN = float("nan")


def difference(mean, low=NAN, high=NAN, pairs=3, *, marked=False):
    return Difference(pairs, mean, low, high, NAN, NAN, marked)


def test_values_are_means_and_deviations():
    assert value_text(REWARD, []) == "–"
    assert value_text(REWARD, [0.5]) == "0.500"
    assert value_text(REWARD, [1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert value_text(REWARD, [1.0, float("inf")]) == "∞"
    assert value_text(MEASURES[3], [0.0, 2e200]) == "1e+200 ± 1.41e+200"


def test_differences_have_signs_and_ratios_times():
    assert difference_text(REWARD, difference(-0.01, -0.03, 0.01)) == "−0.010 [−0.030, +0.010]"
    assert difference_text(REWARD, difference(0.25)) == "+0.250"
    assert difference_text(REWARD, difference(NAN)) == difference_text(REWARD, None) == "no pair"
    twice = difference(0.693147, 0.0, 1.386294)
    assert difference_text(MISMATCH, twice) == "×2.00 [1.00, 4.00]"
    assert difference_text(MISMATCH, difference(1e4)) == "×∞"


def test_no_end_of_an_interval_reads_as_zero_where_it_is_not():
    assert difference_text(REWARD, difference(-1e-3, -3e-3, -2e-4)) == "−0.0010 [−0.0030, −0.0002]"
    assert difference_text(REWARD, difference(0, -3e-7, 2e-7)) == "+0.0e+00 [−3.0e−07, +2.0e−07]"
    near = difference(-0.004, -0.008, -0.0004)
    assert difference_text(MISMATCH, near) == "×0.99601 [0.99203, 0.99960]"


def test_a_long_result_is_cut():
    comparison = ablation(steps=10, seeds=2, arms=30)
    given = {
        (arm.name, "held_out_reward"): difference(-0.01 * i, -1, -0.001, marked=True)
        for i, arm in enumerate(comparison.arms)
        if i
    }
    (said,) = result(replace(comparison, differences=given))[1:]
    assert "callback 23 −0.290" in said
    assert said.endswith(" and 24 more, see the table.")


@pytest.mark.parametrize(
    ("measure", "mean", "word"),
    [(REWARD, 0.1, "better"), (REWARD, -0.1, "worse"), (MISMATCH, 0.1, "worse"),
     (MISMATCH, -0.1, "better"), (ENTROPY, 0.1, "differs")],
)  # fmt: skip
def test_a_marked_difference_has_a_verdict(measure, mean, word):
    assert verdict(measure, difference(mean, marked=True)) == word
    assert verdict(measure, difference(mean)) == ""


def test_the_result_names_what_differs_and_not_what_does_not():
    comparison = ablation(arms=3)
    given = {
        ("empty", "held_out_reward"): difference(-0.2, -0.3, -0.1, marked=True),
        ("without forward_quantization", "held_out_reward"): difference(0.01, -0.02, 0.04),
        ("empty", "entropy"): difference(0.1, 0.05, 0.15, marked=True),
    }
    _, *said = result(replace(comparison, differences=given))
    assert said == [
        "In held-out reward, worse than the baseline: empty −0.200 [−0.300, −0.100].",
        "The other arm is not shown to differ: its interval, from −0.020 to +0.040, says what "
        "differences remain possible.",
        "Entropy at the end: empty (differs).",
    ]


def test_with_one_seed_nothing_is_concluded():
    said = result(ablation(steps=10, seeds=1))
    assert said[1:] == [
        "No arm has two seeds in common with the baseline, so nothing can be concluded about "
        "held-out reward."
    ]


def test_one_arm_has_nothing_beside_it():
    assert result(ablation(steps=10, arms=1)) == [
        "There is one arm, so there is nothing to compare it with."
    ]


def test_measures_are_cut_into_tables_of_like_size():
    comparison = ablation(steps=10, seeds=2, arms=2)
    many = tuple(replace(REWARD, key=str(i)) for i in range(11))
    sizes = [len(b.measures) for b in tables.blocks(replace(comparison, measures=many))]
    assert sizes == [4, 4, 3]
    assert [len(block.measures) for block in tables.blocks(comparison)] == [3, 3]
    assert tables.blocks(replace(comparison, measures=())) == []


def test_recipes_differ_by_what_was_removed_and_not_by_the_seed():
    comparison = ablation(steps=10, seeds=2, arms=4)
    changes = dict(tables.recipe_changes(comparison))
    lines = {arm: [line for kind, line in found if kind in ("add", "drop")]
             for arm, found in changes.items()}  # fmt: skip
    assert lines["without dequantized_backward"] == ["-  dequantized_backward: {}"]
    assert len(lines["empty"]) == 4
    text = " ".join(line for found in changes.values() for _, line in found)
    assert "seed" not in text
    assert "experiment" not in text


def test_equal_plans_are_shown_once():
    plans = tables.plans(ablation(steps=10, seeds=2, arms=4))
    assert [arms for _, arms in plans] == [
        ["full", "without dequantized_backward"],
        ["empty", "without forward_quantization"],
    ]


def test_what_differs_in_the_environment_comes_first_with_its_runs():
    comparison = ablation(steps=10, seeds=2, arms=2)
    runs = dict(comparison.arms[1].runs)
    runs[1] = replace(runs[1], tags={**runs[1].tags, "qrl.torch": "2.12.0", "mlflow.user": "ann"})
    arms = [comparison.arms[0], replace(comparison.arms[1], runs=runs)]
    found = tables.environment(comparison_of(arms))
    assert found == [
        ("mlflow.user", [("not recorded", ""), ("ann", "empty: seed 1")]),
        ("torch", [("2.13.0", ""), ("2.12.0", "empty: seed 1")]),
        ("git_commit", [("0f" * 20, "")]),
        ("python", [("3.11", "")]),
    ]


def test_moments_are_in_utc():
    assert when(0.0) == "1970-01-01 00:00"
