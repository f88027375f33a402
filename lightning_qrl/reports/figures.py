"""Figures: one look for all of them, in colours that a colour-blind reader tells apart.

matplotlib comes with MLflow and takes a second to import, so only what draws imports it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_qrl.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, without its black and its yellow.
BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
)  # fmt: skip
GREY = "#808080"
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PICTURES = (".png", ".pdf", ".svg")
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
}


def check_figure(file: Path) -> None:
    """Fail early if a figure could not be written.

    Raises:
        UserError: the suffix is no kind of picture, or the folder is not there.
    """
    if file.suffix not in PICTURES:
        raise UserError(f"figure {file}: its name must end in {', '.join(PICTURES)}")
    if not file.parent.is_dir():
        raise UserError(f"figure {file} cannot be written: there is no folder {file.parent}")


@contextmanager
def drawn(file: Path, title: str, width: float, heights: list[float]) -> Iterator[list["Axes"]]:
    """Panels one below the other, to draw on; written to a file afterwards.

    Args:
        file: where to; its suffix is the kind of picture.
        title: above the panels.
        width: in inches.
        heights: of the panels, in inches.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure((width, sum(heights) + 0.5), layout="constrained")
        panels = figure.subplots(len(heights), squeeze=False, height_ratios=heights)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        yield list(panels[:, 0])
        try:
            figure.savefig(file, dpi=160)
        except OSError as error:
            raise UserError(f"figure {file} cannot be written: {error.strerror}") from None
