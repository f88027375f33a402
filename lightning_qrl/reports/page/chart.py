"""A chart is a set of small panels of one size, drawn once with matplotlib and shown in two ways.

As a PNG it has its title above and its caption below, to stand alone. On the page it is cut into
one SVG a panel, so that the panels flow: four abreast on a laptop, one below the other on a phone,
and none is cut in two on paper. The SVGs take the page's fonts and, by CSS variables, its colours.
"""

import io
import re
import textwrap
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_qrl.errors import UserError
from lightning_qrl.reports.page.look import LOOK, MUTED, PAPER, VARIABLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_WIDTH = 10.8  # inches: panels abreast in a PNG
HEAD = 0.4  # inches above the panels of a PNG, for its title
LINE = 0.15  # inches of a line of its caption
POINTS = 72  # an inch
DPI = 100
QUICK = {"compress_level": 3}  # a quarter of the time is compression
_FINE = re.compile(r"(?<=\.\d\d)\d+")  # digits beyond a hundredth of a point
SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: shown when it is pointed at, and read aloud.
        about: what it shows, in words, for those who do not see it.
        draw: draws it on the axes.
    """

    title: str
    about: str
    draw: Callable[["Axes"], None]


@dataclass(frozen=True, slots=True)
class Margins:
    """Inches of a panel that are left around its axes."""

    left: float = 0.5
    right: float = 0.12
    top: float = 0.38
    bottom: float = 0.4


@dataclass(frozen=True, slots=True)
class Chart:
    """A set of panels.

    Attributes:
        key: names its file.
        title: what is shown.
        caption: how to read it.
        panels: in reading order.
        width: of a panel, in inches, margins included.
        height: the same.
        margins: around the axes of a panel.
    """

    key: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    width: float
    height: float
    margins: Margins

    @property
    def columns(self) -> int:
        """Panels abreast in a PNG."""
        return min(len(self.panels), max(1, int(PAGE_WIDTH / self.width)))


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart that was drawn.

    Attributes:
        chart: what it shows.
        figure: all of its panels.
        svgs: its panels as elements for an HTML page.
    """

    chart: Chart
    figure: "Figure"
    svgs: tuple[str, ...]


def drawn(chart: Chart) -> Drawn:
    """Draw a chart."""
    with _look(chart):
        figure = _figure(chart)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return Drawn(chart, figure, tuple(_panels(chart, buffer.getvalue())))


def write_pngs(charts: tuple[Drawn, ...], folder: Path) -> list[Path]:
    """Write each chart as a PNG, named by its key.

    Raises:
        UserError: the folder cannot be written to.
    """
    files = []
    for one in charts:
        file = folder / f"{one.chart.key}.png"
        try:
            with _look(one.chart):
                one.figure.savefig(file, dpi=DPI, facecolor=PAPER, pil_kwargs=QUICK)
        except OSError as error:
            raise UserError(f"figure {file} cannot be written: {error.strerror}") from None
        files.append(file)
    return files


@contextmanager
def _look(chart: Chart) -> Iterator[None]:
    """The look, also while a figure is saved; a name may have characters that no font has."""
    import matplotlib as mpl

    # the salt makes ids that are equal from run to run, and differ between charts of one page
    with mpl.rc_context(LOOK | {"svg.hashsalt": chart.key}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        yield


def _figure(chart: Chart) -> "Figure":
    from matplotlib.figure import Figure

    from lightning_qrl.reports.page.bare import BareAxes

    rows = -(-len(chart.panels) // chart.columns)
    width = chart.columns * chart.width
    caption = textwrap.wrap(chart.caption, int(width * 15))
    foot = LINE * (len(caption) + 1)
    height = HEAD + rows * chart.height + foot
    figure = Figure((width, height))
    figure.text(0.1 / width, 1 - 0.12 / height, chart.title, va="top", size=11, weight="bold")
    figure.text(0.1 / width, (foot - 0.05) / height, "\n".join(caption), va="top", size=7.5,
                color=MUTED)  # fmt: skip
    around = chart.margins
    for number, panel in enumerate(chart.panels):
        row, column = divmod(number, chart.columns)
        left = column * chart.width + around.left
        bottom = height - HEAD - (row + 1) * chart.height + around.bottom
        size = (chart.width - around.left - around.right, chart.height - around.top - around.bottom)
        box = (left / width, bottom / height, size[0] / width, size[1] / height)
        panel.draw(figure.add_axes(box, axes_class=BareAxes))
    return figure


def _panels(chart: Chart, document: bytes) -> Iterator[str]:
    """Cut a figure's SVG into its panels."""
    root = ET.fromstring(document)
    defs = {child.get("id", ""): child for one in root.iter(f"{SVG}defs") for child in one}
    axes = [g for g in root.iter(f"{SVG}g") if g.get("id", "").startswith("axes_")]
    for number, (panel, group) in enumerate(zip(chart.panels, axes, strict=True)):
        row, column = divmod(number, chart.columns)
        corner = (column * chart.width * POINTS, (HEAD + row * chart.height) * POINTS)
        size = (chart.width * POINTS, chart.height * POINTS)
        name = f"{chart.key}-{number}"
        box = " ".join(f"{length:.4g}" for length in (*corner, *size))
        svg = ET.Element("svg", {"viewBox": box, "role": "img", "aria-labelledby": f"{name}-t"})
        svg.set("aria-describedby", f"{name}-d")
        ET.SubElement(svg, "title", id=f"{name}-t").text = panel.title
        ET.SubElement(svg, "desc", id=f"{name}-d").text = panel.about
        ET.SubElement(svg, "defs").extend(_used(group, defs, name))
        svg.append(group)
        yield _cleaned(svg)


def _used(group: ET.Element, defs: dict[str, ET.Element], name: str) -> Iterator[ET.Element]:
    """Copies of the shapes and clips that a panel refers to; it then refers to those."""
    for parent in list(group.iter()):
        for child in [child for child in parent if child.tag == f"{SVG}defs"]:
            parent.remove(child)
    needed: dict[str, None] = {}
    for element in group.iter():
        element.attrib.pop("id", None)
        target = element.attrib.pop(f"{XLINK}href", "").removeprefix("#")
        clip = element.get("clip-path", "").removeprefix("url(#").removesuffix(")")
        if target:
            element.set("href", f"#{name}-{target}")
        if clip:
            element.set("clip-path", f"url(#{name}-{clip})")
        needed |= dict.fromkeys(filter(None, (target, clip)))
    for key in needed:
        copied = ET.fromstring(ET.tostring(defs[key]))
        copied.set("id", f"{name}-{key}")
        yield copied


def _cleaned(svg: ET.Element) -> str:
    """An element's text for a page: its own colours, no font but the page's, no line breaks."""
    for element in svg.iter():
        element.tag = element.tag.removeprefix(SVG)
        style = element.get("style", "")
        if element.tag == "text":
            style = "; ".join(part for part in style.split("; ") if "font-family" not in part)
        for colour, variable in VARIABLES.items():
            style = style.replace(colour.lower(), f"var({variable})")
        if style:
            element.set("style", style)
        if "d" in element.attrib:
            element.set("d", _FINE.sub("", " ".join(element.attrib["d"].split())))
        if element.tag not in ("title", "desc", "text", "tspan"):
            element.text = None
        element.tail = None
    return ET.tostring(svg, encoding="unicode")
