"""What every chart of the page shares: ink, type, how names are shortened, ticks.

The colours are names for roles: on paper and in PNGs they are these, on the page each becomes a CSS
variable (`svg.py`), so that the same drawing serves light and dark.
"""

import math
import textwrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightning_qrl.reports.figures import BLUE, GREEN, VERMILION
from lightning_qrl.reports.numbers import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ticks = dict[float, str]  # where, and what stands there
INK, MUTED, LINES, PAPER = "#1B1F24", "#59636E", "#DFE3E8", "#FFFFFF"
SMALL, NORMAL = 7.5, 8.0  # points
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINES: "--lines",
    PAPER: "--paper",
    BLUE: "--blue",
    VERMILION: "--vermilion",
    GREEN: "--green",
}
LOOK: dict[Any, Any] = {
    "font.size": SMALL,
    "legend.frameon": False,
    "path.simplify_threshold": 0.05,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.hinting": "none",  # saves a quarter of the time of a PNG
    "text.parse_math": False,  # a name may hold a dollar sign
}


def on_two_lines(name: str, width: int) -> str:
    """A name for the top of a panel that is so many characters wide."""
    return "\n".join(textwrap.wrap(shortened(name, 2 * width - 6), width)[:2])


def number(value: float) -> str:
    """A tick's number: ``0.001``, ``1``, ``10k``, ``1e-7``."""
    if value and not 1e-3 <= abs(value) < 1e4:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        text = f"{mantissa}e{int(exponent)}" if exponent else mantissa
    else:
        text = f"{value:.6g}"
    return text.replace("-", "−")


def frame(axes: "Axes", along: Ticks, up: Ticks, label: str, *, lines: Literal["x", "y"]) -> None:
    """Ticks, their lines and the label of the horizontal axis, in place of matplotlib's own.

    Those take most of the time in which a page of sixty panels is drawn; these are a line and a
    text each.
    """
    axes.set_axis_off()
    below, beside = axes.get_xaxis_transform(), axes.get_yaxis_transform()
    for tick, text in along.items():
        axes.text(tick, -0.03, text, transform=below, ha="center", va="top", color=MUTED)
        if lines == "x":
            axes.axvline(tick, color=LINES, lw=0.6, zorder=0)
    for tick, text in up.items():
        colour = MUTED if lines == "y" else INK
        axes.text(-0.02, tick, text, transform=beside, ha="right", va="center", color=colour)
        if lines == "y":
            axes.axhline(tick, color=LINES, lw=0.6, zorder=0)
    height = axes.bbox.height / axes.figure.dpi  # inches
    axes.text(0.5, -0.19 / height, label, transform=axes.transAxes, ha="center", va="top",
              color=MUTED)  # fmt: skip


def log_ticks(low: float, high: float) -> list[float]:
    """A few round numbers between two positive ones: powers of ten, and what fits between them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high / low)
    every = max(1, math.ceil(decades / 5))
    factors = (1, 2, 5) if decades < 1.2 else (1, 3) if decades < 2.4 else (1,)
    ticks = [f * 10.0**power for power in range(first, last + 1, every) for f in factors]
    within = [tick for tick in ticks if low <= tick <= high]
    return within or [float(f"{math.sqrt(low * high):.1g}")]


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """A few round numbers between two."""
    from matplotlib.ticker import MaxNLocator

    ticks = np.asarray(MaxNLocator(count, steps=[1, 2, 5, 10]).tick_values(low, high))
    return [0.0 if abs(tick) < 1e-12 * (high - low) else tick for tick in ticks
            if low <= tick <= high]  # fmt: skip
