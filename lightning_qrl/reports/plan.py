"""The precision plan as a table: for a terminal, and as columns for an artefact."""

from collections.abc import Callable, Sequence

from rich.table import Table

from lightning_qrl.precision import LinearPrecision, Row

HEADINGS = (
    "layer",
    "shape",
    "weight",
    "activation",
    "backward",
    "kept by",
    "decay",
    "backend",
    "why",
    "note",
)
PLAIN = "·"  # the plain layer, in the trainer's own precision


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, in the order of `HEADINGS`; the two sides are shown where they differ."""
    return (
        row.layer,
        "x".join(map(str, row.shape)),
        _sides(row, lambda p: "fp32" if p.fp32 else str(p.weight or PLAIN)),
        _sides(row, lambda p: "fp32" if p.fp32 else str(p.activation or PLAIN)),
        _sides(row, _backward),
        ", ".join(row.kept_by),
        "yes" if row.weight_decay else "no",
        _sides(row, lambda p: p.backend) if row.quantized else "",
        row.why,
        row.note,
    )


def plan_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The table by columns."""
    texts = [cells(row) for row in rows]
    return {heading: [text[i] for text in texts] for i, heading in enumerate(HEADINGS)}


def plan_table(rows: Sequence[Row]) -> Table:
    """The table for a terminal; columns in which no row says anything are left out."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = {name: texts for name, texts in plan_columns(rows).items() if any(texts)}
    for heading in shown:
        table.add_column(heading, overflow="fold")
    for texts in zip(*shown.values(), strict=True):
        table.add_row(*texts)
    return table


def plan_text(rows: Sequence[Row]) -> str:
    """The table as plain text, one line a layer."""
    texts = [HEADINGS, *(cells(row) for row in rows)]
    widths = [max(len(text[i]) for text in texts) for i in range(len(HEADINGS))]
    lines = ("  ".join(t.ljust(w) for t, w in zip(text, widths, strict=True)) for text in texts)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _sides(row: Row, show: Callable[[LinearPrecision], str]) -> str:
    train, rollout = (PLAIN if p is None else show(p) for p in (row.train, row.rollout))
    return train if train == rollout else f"train {train}, rollout {rollout}"


def _backward(precision: LinearPrecision) -> str:
    if precision.fp32:
        return "fp32"
    if precision.backward != "quantized":
        return precision.backward
    if not precision.quantized:
        return str(precision.gradient or PLAIN)
    return f"quantized, gradient {precision.gradient or PLAIN}"
