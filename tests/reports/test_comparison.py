"""Comparisons of simulated runs: false verdicts, coverage, and what the notes say."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from recorded import learning, recorded
from scipy import stats

from lightning_qrl.errors import UserError
from lightning_qrl.reports.comparison import compare
from lightning_qrl.tracking.notebook import History

NAMES = ("full", "the same", "the same again", "once more")


def experiment(number, seeds=4, arms=NAMES, shift=0.0, **given):
    """Runs of every arm and seed; of all but the first the reward is shifted."""
    return [
        recorded(
            f"{arm}-seed{seed}",
            learning((number * 10 + a) * 10 + seed, 40, shift=shift * (a > 0)),
            seed=seed, arm=arm, recipe_hash=arm, started=a, **given,
        )
        for a, arm in enumerate(arms)
        for seed in range(seeds)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
def test_equal_recipes_are_called_different_no_oftener_than_stated(seeds):
    """By family: whether any of three arms is marked, in each measure, in 200 experiments."""
    experiments = 200
    marked = {}
    for number in range(experiments):
        comparison = compare(experiment(number, seeds))
        for measure in comparison.measures:
            any_arm = any(comparison.differences[arm, measure.key].marked for arm in NAMES[1:])
            marked[measure.key] = marked.get(measure.key, 0) + any_arm
    limit = stats.binom.ppf(0.999, experiments, 0.05)
    print(seeds, marked)
    assert len(marked) == 10
    assert max(marked.values()) <= limit


def test_two_names_of_one_recipe_and_a_known_shift():
    """200 experiments of two arms: without a shift, then with one."""
    experiments, shift = 200, -0.02
    wrong = held = 0
    for number in range(experiments):
        same = compare(experiment(number, arms=NAMES[:2]))
        wrong += same.differences["the same", "held_out_reward"].marked
        shifted = compare(experiment(number, arms=NAMES[:2], shift=shift))
        found = shifted.differences["the same", "held_out_reward"]
        held += found.low <= shift * (1 - math.exp(-5)) <= found.high
    assert wrong <= stats.binom.ppf(0.999, experiments, 0.05)
    low, high = stats.binom.ppf([0.001, 0.999], experiments, 0.95)
    assert low <= held <= high


def test_differences_are_paired_by_seed():
    """Noise that both runs of a seed share is gone; a seed that only one arm has is left out."""
    rng = np.random.default_rng(0)
    shared = rng.normal(0, 0.2, 6)
    own = rng.normal(0, 0.001, (2, 6))

    def run(arm, seed, a):
        reward = 0.5 + shared[seed] + own[a, seed] + 0.01 * a
        return recorded(f"{arm}{seed}", {"eval/reward": History(np.array([4]), np.array([reward]))},
                        seed=seed, arm=arm, recipe_hash=arm, started=a)  # fmt: skip

    runs = [run("full", seed, 0) for seed in range(5)] + [run("other", s, 1) for s in range(1, 6)]
    found = compare(runs).differences["other", "held_out_reward"]
    apart = 0.01 + own[1, 1:5] - own[0, 1:5]
    assert (found.pairs, found.marked) == (4, True)
    assert found.mean == pytest.approx(apart.mean())
    assert found.p == pytest.approx(stats.ttest_1samp(apart, 0).pvalue)


def test_holm_is_over_the_arms_of_a_measure():
    comparison = compare(experiment(0))
    for measure in comparison.measures:
        found = [comparison.differences[arm, measure.key] for arm in NAMES[1:]]
        smallest = min(found, key=lambda difference: difference.p)
        assert smallest.p_holm == pytest.approx(min(1, 3 * smallest.p))


def test_sizes_are_compared_by_ratio_and_by_difference_where_one_is_zero():
    def run(arm, seed, speed, mismatch):
        metrics = {
            "train/tokens_per_second": History(np.array([1]), np.array([speed])),
            "train/sampling/sampling_logp_difference/mean": History(
                np.array([1]), np.array([mismatch])
            ),
        }
        return recorded(arm, metrics, seed=seed, arm=arm, recipe_hash=arm)

    runs = [run("full", 0, 100.0, 0.0), run("full", 1, 10.0, 0.1)]
    runs += [run("other", 0, 200.0, 0.3), run("other", 1, 20.0, 0.4)]
    comparison = compare(runs)
    scales = {measure.key: measure.scale for measure in comparison.measures}
    assert any("|Δlogprob| is compared by difference, not by ratio" in n for n in comparison.notes)
    assert scales == {"tokens_per_second": "ratio", "mismatch": "difference"}
    speed = comparison.differences["other", "tokens_per_second"]
    assert math.exp(speed.mean) == pytest.approx(2)
    assert not speed.marked  # two pairs without spread
    assert any("no spread to judge by" in note for note in comparison.notes)
    assert comparison.differences["other", "mismatch"].mean == pytest.approx(0.3)


def test_one_seed_concludes_nothing():
    comparison = compare(experiment(0, seeds=1, shift=-0.5))
    assert comparison.notes[0].startswith("Nothing can be concluded")
    assert not any(difference.marked for difference in comparison.differences.values())
    some = compare([run for run in experiment(0) if run.name != "once more-seed0"][:-2])
    assert some.notes[0].startswith("Nothing can be concluded about once more:")


def test_equal_runs_differ_by_nothing():
    runs = experiment(0, arms=NAMES[:1])
    runs += [
        replace(run, id=f"{run.id}'", tags={**run.tags, "qrl.arm": "copy"}, started=9.0)
        for run in runs
    ]
    for difference in compare(runs).differences.values():
        assert (difference.mean, difference.p, difference.marked) == (0, 1, False)


def test_a_failed_run_has_no_numbers_and_is_told():
    runs = experiment(0, arms=NAMES[:2])
    runs[-1] = replace(runs[-1], status="FAILED", tags={**runs[-1].tags, "qrl.error": "diverged"})
    comparison = compare(runs)
    assert comparison.arms[1].errors == {3: "diverged"}
    assert list(comparison.arms[1].values["held_out_reward"]) == [0, 1, 2]
    assert comparison.differences["the same", "held_out_reward"].pairs == 3
    assert any("the same (1 of 4)" in note and "flatters" in note for note in comparison.notes)


def test_an_arm_that_lost_seeds_gets_no_star():
    """Two of six seeds are lost, in three ways; the others are far better than the baseline."""
    runs = experiment(0, seeds=6, arms=NAMES[:2], shift=0.5)
    assert compare(runs).differences["the same", "held_out_reward"].marked
    for way in ("failed", "nan", "inf"):
        lost = list(runs)
        for place in (10, 11):
            steps, values = runs[place].metrics["eval/reward"]
            ends = History(steps, np.append(values[:-1], float(way if way != "failed" else 0)))
            if way == "failed":
                lost[place] = replace(runs[place], status="FAILED")
            else:
                metrics = {**runs[place].metrics, "eval/reward": ends}
                lost[place] = replace(runs[place], metrics=metrics)
        comparison = compare(lost)
        found = comparison.differences["the same", "held_out_reward"]
        assert (found.pairs, found.marked, found.withheld) == (4, False, True)
        assert any(note.startswith("No star for the same in held-out reward") for note in
                   comparison.notes)  # fmt: skip
    stopped = [*runs[:10], *(replace(run, status="KILLED") for run in runs[10:])]
    comparison = compare(stopped)
    assert comparison.differences["the same", "held_out_reward"].marked
    assert any("interrupted have no numbers yet: the same (2 of 6)" in n for n in comparison.notes)


def design(arms, seeds=3) -> str:
    given = [
        {"name": name, "removed": removed, "overrides": level} for name, removed, level in arms
    ]
    return json.dumps({"arms": given, "seeds": list(range(seeds)), "same": {}})


FACTORS = (
    ("full, grpo.loss=dapo", [], ["grpo.loss=dapo"]),
    ("without a, grpo.loss=dapo", ["a"], ["grpo.loss=dapo"]),
    ("full, grpo.loss=gspo", [], ["grpo.loss=gspo"]),
    ("without a, grpo.loss=gspo", ["a"], ["grpo.loss=gspo"]),
)


def test_with_factors_an_arm_is_compared_with_the_full_arm_of_its_level():
    """The order of start is not that of the design."""
    names = [name for name, _, _ in FACTORS]
    runs = experiment(0, seeds=3, arms=names[::-1])
    comparison = compare(runs, design=design(FACTORS))
    assert [arm.name for arm in comparison.arms] == names
    references = [comparison.reference(arm).name for arm in comparison.arms]
    assert references == [names[0], names[0], names[0], names[2]]
    own = comparison.arms[3].values["held_out_reward"]
    base = comparison.arms[2].values["held_out_reward"]
    found = comparison.differences[names[3], "held_out_reward"]
    assert found.mean == pytest.approx(np.mean([own[seed] - base[seed] for seed in range(3)]))
    assert any("full arm of the same factors" in note for note in comparison.notes)
    chosen = compare(runs, design=design(FACTORS), baseline=names[1])
    assert {chosen.reference(arm).name for arm in chosen.arms} == {names[1]}
    assert compare(runs).baseline.name == names[2]  # without a design, the first full one


def test_an_unfinished_ablation_is_said_to_be_one():
    runs = experiment(0, seeds=2, arms=("full", "without a"))
    arms = (("full", [], []), ("without a", ["a"], []))
    assert not any("unfinished" in note for note in compare(runs, design=design(arms, 2)).notes)
    runs[-1] = replace(runs[-1], status="KILLED")
    notes = compare(runs, design=design(arms, 3)).notes
    assert notes[0].startswith("The ablation is unfinished: 3 of 6 runs are to come; the same")
    assert compare(runs, design="[1]").baseline.name == "full"


def test_a_baseline_that_failed_is_named_and_more_seeds_are_not_advised():
    runs = [replace(run, status="FAILED") if "full" in run.name else run
            for run in experiment(0, arms=NAMES[:2])]  # fmt: skip
    notes = " ".join(compare(runs).notes)
    assert "Nothing can be concluded: no run of the baseline full finished." in notes
    assert "Run more seeds" not in notes
    assert "does not rise" not in notes


def test_that_every_run_failed_is_a_result():
    runs = [replace(run, status="FAILED") for run in experiment(0, arms=NAMES[:2])]
    comparison = compare(runs)
    assert (comparison.measures, comparison.differences) == ((), {})
    assert [len(arm.errors) for arm in comparison.arms] == [4, 4]
    assert comparison.notes[0].startswith("Nothing can be concluded")
    assert not any("survived" in note for note in comparison.notes)


def test_values_that_are_not_finite_and_thresholds_never_reached_are_told():
    runs = experiment(0, arms=NAMES[:2])
    norms = runs[0].metrics["train/grad_norm"]
    runs[0].metrics["train/grad_norm"] = History(norms.steps, np.append(norms.values[:-1], np.inf))
    comparison = compare(runs, threshold=2.0)
    assert comparison.arms[0].values["largest_grad_norm"][0] == math.inf
    assert comparison.differences["the same", "largest_grad_norm"].pairs == 3
    assert 0 in comparison.arms[0].values["spikes"]
    (note,) = [note for note in comparison.notes if "not finite at some step" in note]
    assert "full (1 of 4)" in note
    (note,) = [note for note in comparison.notes if "Never reached" in note]
    assert "full (4 of 4), the same (4 of 4)" in note


def test_runs_of_other_lengths_or_code_are_told():
    runs = experiment(0, arms=NAMES[:2])
    for name in ("train/reward", "eval/reward"):
        steps, values = runs[0].metrics[name]
        runs[0].metrics[name] = History(steps[steps <= 20], values[steps <= 20])
    runs[1].tags["qrl.git_commit"], runs[2].tags["qrl.git_commit"] = "a" * 40, "b" * 40
    notes = " ".join(compare(runs).notes)
    assert "Runs are of different lengths: 20 to 40 steps." in notes
    assert "commits aaaaaaaa, bbbbbbbb" in notes


def test_the_baseline():
    runs = experiment(0, arms=("x", "full", "y"))
    assert [arm.name for arm in compare(runs).arms] == ["full", "x", "y"]
    assert [arm.name for arm in compare(runs, baseline="y").arms] == ["y", "full", "x"]
    with pytest.raises(UserError, match="--baseline z: there is no such arm; the nearest are y"):
        compare(runs, baseline="z")
    assert compare(experiment(0, arms=("x", "y"))).baseline.name == "x"


def test_nothing_to_compare():
    with pytest.raises(UserError, match="no run of e has ended"):
        compare([recorded("x", {}, status="RUNNING")], title="e")
    with pytest.raises(UserError, match="have none of the metrics eval/reward"):
        compare([recorded("x", {})])
    only = compare(experiment(0, arms=("x",)))
    assert only.notes[0] == "There is one arm, x: nothing to compare it with."


def test_a_further_metric():
    comparison = compare(experiment(0), metrics=["train/kl"])
    assert [measure.key for measure in comparison.measures][-2:] == [
        "train/kl/last",
        "train/kl/mean",
    ]
    run = comparison.baseline.runs[0]
    assert comparison.baseline.values["train/kl/mean"][0] == run.metrics["train/kl"].values.mean()
