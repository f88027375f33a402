"""Which runs are one arm, what it is called, and which run of a seed counts."""

import pytest
from recorded import recorded

from lightning_qrl.reports.arms import gather, seed_of


def names(*runs) -> dict[str, list[int]]:
    arms, _ = gather(runs)
    return {arm.name: list(arm.runs) for arm in arms}


def test_arms_of_an_ablation():
    runs = [
        recorded(f"{arm}-seed{seed}", {}, seed=seed, arm=arm, recipe_hash=arm, started=i,
                 tags={"qrl.removed": removed, "qrl.recipe": "4bitter"})
        for i, (arm, removed) in enumerate([("full", ""), ("without a and b", "a,b")])
        for seed in (1, 0)
    ]  # fmt: skip
    arms, notes = gather(runs)
    assert [(arm.name, list(arm.runs), arm.removed) for arm in arms] == [
        ("full", [0, 1], ()),
        ("without a and b", [0, 1], ("a", "b")),
    ]
    assert (arms[0].recipe, arms[0].errors, notes) == ("4bitter", {}, [])


def test_runs_of_one_recipe_are_an_arm_whatever_their_names():
    tags = {"qrl.recipe": "4bitter"}
    runs = [
        recorded("x", {}, seed=0, recipe_hash="aa", tags=tags),
        recorded("y", {}, seed=1, recipe_hash="aa", tags=tags),
    ]
    assert names(*runs) == {"4bitter": [0, 1]}


def test_arms_of_one_name_are_told_apart_by_what_differs():
    def run(seed, digest, recipe="4bitter", **params):
        tags = {"qrl.recipe": recipe}
        params = {"seed": str(seed), "tracking.run_name": digest, "lr": "1", **params}
        return recorded(f"{digest}{seed}", {}, seed=seed, recipe_hash=digest, tags=tags,
                        params=params)  # fmt: skip

    assert names(run(0, "aaaa"), run(1, "aaaa"), run(0, "bbbb", lr="2")) == {
        "4bitter, lr=1": [0, 1],
        "4bitter, lr=2": [0],
    }
    assert names(run(0, "a" * 64), run(0, "b" * 64, **{str(i): "x" for i in range(9)})) == {
        "4bitter, aaaaaaaa": [0],
        "4bitter, bbbbbbbb": [0],
    }
    full = [
        recorded(digest, {}, seed=0, arm="full", recipe_hash=digest, tags={"qrl.recipe": digest})
        for digest in ("4bitter", "mxfp8")
    ]
    assert names(*full) == {"full, 4bitter": [0], "full, mxfp8": [0]}


def test_foreign_runs_go_by_name_less_a_seed():
    runs = [recorded(name, {}) for name in ("lr3-seed0", "lr3-seed1", "lr4_s1", "plain")]
    assert names(*runs) == {"lr3": [0, 1], "lr4": [1], "plain": [0]}


def test_foreign_runs_of_one_name_are_told_apart_by_their_parameters():
    runs = [
        recorded("exp", {}, id=f"{lr}-{seed}",
                 params={"lr": lr, "seed": str(seed), "trainer/output_dir": f"out/{lr}/{seed}"})
        for lr in ("0.001", "0.0001") for seed in (0, 1)
    ]  # fmt: skip
    assert names(*runs) == {"exp, lr=0.001": [0, 1], "exp, lr=0.0001": [0, 1]}


def test_a_name_of_two_words_and_a_number_is_not_one_that_mlflow_made_up():
    runs = [
        recorded(name, {}, id=f"{name}{seed}", params={"lr": "1", "seed": str(seed)})
        for name in ("lora-r-16", "lora-r-32")
        for seed in (0, 1)
    ]
    assert names(*runs) == {"lora-r-16": [0, 1], "lora-r-32": [0, 1]}


def test_names_of_arms_are_unique():
    full = [
        recorded(digest, {}, seed=0, arm="full", recipe_hash=digest, tags={"qrl.recipe": digest})
        for digest in ("a", "b")
    ]
    other = recorded("x", {}, seed=0, arm="full, a", recipe_hash="c")
    assert names(*full, other) == {"full, a": [0], "full, b": [0], "full, a (2)": [0]}


def test_names_that_mlflow_made_up_go_by_their_parameters():
    params = [("1", 0), ("1", 1), ("2", 0), ("2", 1)]
    runs = [
        recorded(f"bold-fox-{i}", {}, params={"lr": lr, "seed": str(seed)})
        for i, (lr, seed) in enumerate(params)
    ]
    assert names(*runs) == {"tests, lr=1": [0, 1], "tests, lr=2": [0, 1]}


@pytest.mark.parametrize(
    ("name", "given", "seed"),
    [
        ("a-seed3", {}, 3),
        ("a_s12", {}, 12),
        ("a-seed3", {"params": {"seed": "4"}}, 4),
        ("a", {"tags": {"seed": "5"}}, 5),
        ("a", {"tags": {"qrl.seed": "6"}, "params": {"seed": "7"}}, 6),
        ("bits3", {}, None),
        ("a", {"params": {"seed": "None"}}, None),
    ],
)
def test_where_a_seed_is_told(name, given, seed):
    assert seed_of(recorded(name, {}, **given)) == seed


def test_without_seeds_runs_pair_by_their_order_and_a_note_says_so():
    runs = [recorded("x", {}, id=str(i), started=-i) for i in range(3)]
    (arm,), notes = gather(runs)
    assert [run.id for run in arm.runs.values()] == ["2", "1", "0"]
    assert ["do not tell their seeds" in note for note in notes] == [True]


def test_of_a_seed_the_newest_finished_run_counts():
    def run(name, status, started):
        return recorded(name, {}, seed=0, arm="full", status=status, started=started)

    runs = [run("a", "FINISHED", 1), run("b", "FINISHED", 2), run("c", "FAILED", 3)]
    (arm,), notes = gather(runs)
    assert (arm.runs[0].name, arm.errors) == ("b", {})
    assert ["more than once with seed 0" in note for note in notes] == [True]


def test_failed_killed_and_running():
    error = {"tags": {"qrl.error": "train/loss is not finite"}}
    (arm,), notes = gather(
        [
            recorded("x-seed0", {}, status="FAILED", **error),
            recorded("x-seed1", {}, status="KILLED"),
            recorded("x-seed2", {}, status="RUNNING"),
        ]
    )
    assert (arm.errors, arm.interrupted) == ({0: "train/loss is not finite"}, [1])
    assert (list(arm.runs), list(arm.finished)) == ([0, 1], [])
    assert notes == ["Still running, and left out: x-seed2."]
