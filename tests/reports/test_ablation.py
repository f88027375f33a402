"""The grid of an ablation and its lines."""

from io import StringIO

from rich.console import Console

from lightning_qrl.reports.ablation import Cell, Standing, grid, line, result


def standing() -> Standing:
    cells = {
        ("full", 0): Cell("done", 0.5),
        ("full", 1): Cell("done", 1.0),
        ("empty", 0): Cell("running", part=0.25),
        ("empty", 1): Cell(),
        ("without a", 0): Cell("failed", error="no judge today"),
        ("without a", 1): Cell("done"),
    }
    return Standing("ablation of r", ("full", "empty", "without a"), (0, 1), cells, 63.0)


def drawn(of: Standing) -> str:
    console = Console(width=80, record=True, file=StringIO())
    console.print(grid(of))
    return console.export_text()


def test_the_grid_has_what_there_is_of_each():
    assert standing().rows() == [
        ["full", "0.500", "1.000", "0.750"],
        ["empty", "25%", ".", ""],
        ["without a", "failed", "done", ""],
    ]
    text = drawn(standing())
    assert "seed 0" in text
    assert "4/6 done, 1m03s left" in text
    assert "without a seed 0: no judge today" in text


def test_names_are_no_markup():
    name = "full, callbacks.a=[b, 'c']"
    of = Standing("ablation of [red]r[/]", [name], (0,), {(name, 0): Cell("failed", error="[x]")})
    assert all(text in drawn(of) for text in ("ablation of [red]r[/]", name, "[x]"))


def test_a_line_tells_of_one_that_has_ended():
    assert line(standing(), ("full", 1)) == "4/6 done, 1m03s left  full seed 1 done: held-out 1.000"
    failed = line(standing(), ("without a", 0))
    assert failed.endswith("without a seed 0 failed: no judge today")
    assert line(standing(), ("without a", 1)).endswith("without a seed 1 done")


def test_the_last_words_say_what_failed_and_what_to_do():
    words = result(standing(), "abc")
    assert "failed  without a seed 0: no judge today" in words
    assert words.endswith("compare  qrl compare abc")
