"""A comparison as one page: an HTML file that needs no network, and its figures as PNGs.

The page is a template, `page.html.j2`, which lays out what the modules here work out: `words` the
result in sentences, `tables` the tables, `curves` and `forest` the charts. Jinja escapes every text
that it is given, so an arm may be named ``<script>``. The same comparison gives the same bytes.

    figures = write_page(comparison, Path("page.html"))
    write_pngs(figures, folder)
"""

from importlib.resources import files
from pathlib import Path

from lightning_qrl.errors import UserError
from lightning_qrl.reports.comparison import Comparison
from lightning_qrl.reports.numbers import plain
from lightning_qrl.reports.page import tables
from lightning_qrl.reports.page.chart import Drawn, drawn, write_pngs
from lightning_qrl.reports.page.curves import curves
from lightning_qrl.reports.page.forest import forest
from lightning_qrl.reports.page.words import facts, result

__all__ = ["Drawn", "write_page", "write_pngs"]


def write_page(comparison: Comparison, file: Path) -> tuple[Drawn, ...]:
    """Write the page.

    Args:
        comparison: what it shows; its runs hold the histories of `page.axis.QUANTITIES` and the
            texts ``recipe.yaml`` and ``plan.txt``, as far as they have them.
        file: where to.

    Returns:
        The charts that are on it, for `write_pngs`.

    Raises:
        UserError: the file cannot be written.
    """
    differences = forest(comparison)
    first = [differences] if differences else []
    charts = tuple(drawn(chart) for chart in [*first, *curves(comparison)])
    text = _render(comparison, charts).encode("utf-8", "replace")  # a name may be ill-formed
    try:
        file.write_bytes(text)
    except OSError as error:
        raise UserError(f"page {file} cannot be written: {error.strerror}") from None
    return charts


def _render(comparison: Comparison, charts: tuple[Drawn, ...]) -> str:
    from jinja2 import Environment, StrictUndefined

    here = files(__package__)
    jinja = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.filters["plain"] = plain
    return jinja.from_string((here / "page.html.j2").read_text()).render(
        comparison=comparison,
        charts=charts,
        style=(here / "page.css").read_text(),
        facts=facts(comparison),
        result=result(comparison),
        tables=tables,
    )
