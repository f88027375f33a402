"""The plan as a table."""

from rich.console import Console

from lightning_qrl.build import build
from lightning_qrl.launch import rehearse
from lightning_qrl.recipe import load_recipe
from lightning_qrl.reports.plan import HEADINGS, plan_columns, plan_table, plan_text


def rows(*overrides, recipe="4bitter", without=()):
    return rehearse(build(load_recipe(recipe, overrides, without))).table()


def test_text_has_one_line_a_layer():
    table = rows()
    lines = plan_text(table).splitlines()
    assert len(lines) == len(table) + 1
    assert all(heading in lines[0] for heading in HEADINGS)
    assert all(line.startswith(row.layer) for line, row in zip(lines[1:], table, strict=True))
    assert "dequantized" in plan_text(table)
    assert "bf16_tail" in lines[-2]  # of the last decoder layer; the head comes after


def test_columns_have_one_text_a_layer():
    columns = plan_columns(rows())
    assert tuple(columns) == HEADINGS
    assert {len(texts) for texts in columns.values()} == {57}


def test_the_two_sides_are_shown_where_they_differ():
    text = plan_text(rows("callbacks.forward_quantization.side=rollout"))
    assert "train ·, rollout nvfp4" in text


def test_the_gradients_format_is_shown_of_a_quantized_backward():
    override = "callbacks.quantized_backward.format=fp8_e4m3"
    assert "quantized, gradient fp8_e4m3" in plan_text(
        rows(override, without=["dequantized_backward"])
    )


def test_a_terminal_shows_only_columns_that_say_something():
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(plan_table(rows(recipe="base")))
    head = capture.get().splitlines()[0]
    assert "layer" in head
    assert "kept by" not in head
