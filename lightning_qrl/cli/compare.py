"""`qrl compare`: a table and a page of runs, from MLflow."""

import math
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_qrl.cli.options import check_file
from lightning_qrl.errors import UserError, first_line

if TYPE_CHECKING:
    from lightning_qrl.reports.comparison import Comparison
    from lightning_qrl.tracking.notebook import Selection

PAGE_TEXTS = ("recipe.yaml", "plan.txt")  # artefacts of runs that a page shows


class Format(StrEnum):
    """What is printed."""

    text = "text"
    json = "json"
    csv = "csv"


def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EXPERIMENT|PARENT|RUN]...",
            help="Names or run ids; the newest ablation, else experiment lightning_qrl.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show this logged metric too; may be repeated."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="ARM",
            help="What others are compared with; else full, that of their factors' levels.",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Held-out reward to reach; 90% of the way that the baseline goes."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with figures.")
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.text,
) -> None:
    """Compare arms of runs: means over seeds, paired differences with intervals, and a page.

    An arm is an arm of an ablation, a recipe, or runs that are named alike but for their seed.
    Runs are those of MLFLOW_TRACKING_URI, else of the file mlflow.db here, made by qrl or not.

    Example: qrl compare ablate-4bitter --metric quant/weight/sqnr_db/mean --html page.html
    """
    _check(html, threshold)
    from lightning_qrl.reports.comparison import compare as compare_runs
    from lightning_qrl.reports.comparison_data import comparison_csv, comparison_json
    from lightning_qrl.reports.comparison_text import comparison_text
    from lightning_qrl.reports.measures import METRICS
    from lightning_qrl.reports.page.axis import QUANTITIES
    from lightning_qrl.tracking.client import tracking_uri
    from lightning_qrl.tracking.notebook import select_runs

    metrics = list(dict.fromkeys(metric or ()))
    found = select_runs(tracking_uri(None), names or ())
    _check_metrics(metrics, found)
    drawn = [quantity.metric for quantity in QUANTITIES] if html else []
    runs = found.read({*METRICS, *metrics, *drawn}, PAGE_TEXTS if html else ())
    comparison = compare_runs(
        runs, title=found.title, metrics=metrics, baseline=baseline, threshold=threshold,
        design=found.design(),
    )  # fmt: skip
    texts = {"text": comparison_text, "json": comparison_json, "csv": comparison_csv}
    print(texts[format](comparison), end="")
    if html is not None:
        _write_page(comparison, found, html)
        if format is Format.text:
            print(f"\npage  {html}")


def _check_metrics(metrics: list[str], found: "Selection") -> None:
    from lightning_qrl.tracking.client import near_names

    for name in metrics:
        if name not in found.metrics:
            near = near_names(name, sorted(found.metrics)) or "there are none"
            raise UserError(f"--metric {name}: no run of {found.title} has it; {near}")


def _write_page(comparison: "Comparison", found: "Selection", html: Path) -> None:
    """The page, and its figures as artefacts of the parent runs, if there are any."""
    from lightning_qrl.reports.page import write_page, write_pngs

    figures = write_page(comparison, html)
    if not found.parents:
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_pngs(figures, Path(folder))
            found.attach(Path(folder), "comparison")
    except (OSError, UserError) as error:  # the page is written, and the table printed
        print(f"figures not logged: {first_line(error)}", file=sys.stderr)


def _check(file: Path | None, threshold: float | None) -> None:
    """Fail before anything is read."""
    if threshold is not None and not math.isfinite(threshold):
        raise UserError(f"--threshold must be a finite number, got {threshold}")
    if file is not None:
        check_file("--html", file, ".html")
