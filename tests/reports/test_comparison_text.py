"""A comparison as text, JSON and CSV."""

import csv
import io
import json
from dataclasses import replace

import pytest
from recorded import learning, recorded

from lightning_qrl.reports.comparison import Comparison, compare
from lightning_qrl.reports.comparison_data import comparison_csv, comparison_json
from lightning_qrl.reports.comparison_text import WIDTH, comparison_text


def compared(seeds=3) -> Comparison:
    runs = [
        recorded(f"{arm}-{seed}", learning(10 * a + seed, 40, shift=-0.2 * (a == 1)), seed=seed,
                 arm=arm, recipe_hash=arm, started=a)
        for a, arm in enumerate(("full", "without bf16_tail", "empty, grpo.loss=gspo"))
        for seed in range(seeds)
    ]  # fmt: skip
    runs[-1] = replace(
        runs[-1], status="FAILED", tags={**runs[-1].tags, "qrl.error": "train/loss is not finite"}
    )
    return compare(runs, title="ablate-4bitter")


def test_the_tables_fit_and_show_every_measure_with_its_marks():
    comparison = compared()
    text = comparison_text(comparison)
    assert text.startswith("ablate-4bitter\n\narm")
    assert max(map(len, text.splitlines())) <= WIDTH
    for measure in comparison.measures:
        assert text.count(measure.label) >= 1
    tables = text.split("\n\n")[1:-2]
    assert [table.splitlines()[0].split()[0] for table in tables] == ["arm"] * len(tables)
    (row,) = [line for line in tables[0].splitlines() if line.startswith("without bf16_tail")]
    assert row.count("]*") == 1
    (row,) = [line for line in tables[0].splitlines() if line.startswith("empty")]
    assert "(2 of 3)" in row
    assert "*" not in row
    assert "failed  empty, grpo.loss=gspo, seed 2: train/loss is not finite\n" in text
    assert text.count("\n- ") == len(comparison.notes)


def test_one_seed_says_that_nothing_can_be_concluded():
    text = comparison_text(compared(seeds=1))
    assert "\n- Nothing can be concluded" in text
    assert "[" not in text.partition("\n- ")[0]


def test_a_single_arm_has_no_differences():
    text = comparison_text(compare([recorded("x", learning(0), seed=0)]))
    assert "difference" not in text.partition("\n- ")[0]


def test_names_stay_on_their_lines():
    odd = "a\nb\t" + "very " * 20 + "long"
    runs = [recorded("x", learning(0), seed=0, arm=odd),
            recorded("y", {}, seed=1, arm=odd, status="FAILED")]  # fmt: skip
    text = comparison_text(compare(runs, title="x"))
    assert max(map(len, text.partition("failed")[0].splitlines())) <= WIDTH
    assert "\na b very" in text
    assert "\t" not in text


def test_json_has_all_of_it():
    comparison = compared()
    read = json.loads(comparison_json(comparison), parse_constant=pytest.fail)
    assert (read["title"], read["baseline"]) == ("ablate-4bitter", "full")
    assert [m["key"] for m in read["measures"]] == [m.key for m in comparison.measures]
    full, without, other = read["arms"]
    own = full["values"]["held_out_reward"]
    values = comparison.baseline.values["held_out_reward"]
    assert own["by_seed"] == {str(seed): value for seed, value in values.items()}
    assert (own["seeds"], own["difference"]) == (3, None)
    found = comparison.differences["without bf16_tail", "held_out_reward"]
    assert without["values"]["held_out_reward"]["difference"]["low"] == found.low
    assert without["values"]["held_out_reward"]["difference"]["marked"] is True
    assert other["runs"]["2"]["error"] == "train/loss is not finite"
    assert read["notes"] == list(comparison.notes)


def test_csv_has_a_row_an_arm_and_measure():
    comparison = compared(seeds=1)
    rows = list(csv.DictReader(io.StringIO(comparison_csv(comparison))))
    assert len(rows) == 3 * len(comparison.measures)
    assert [row["difference"] for row in rows if row["arm"] == "full"] == [""] * (len(rows) // 3)
    row = rows[len(comparison.measures)]
    assert (row["arm"], row["measure"], row["pairs"]) == (
        "without bf16_tail", "held_out_reward", "1",
    )  # fmt: skip
    found = comparison.differences["without bf16_tail", "held_out_reward"]
    assert float(row["difference"]) == found.mean
    assert (row["low"], row["p"], row["marked"]) == ("", "", "False")
