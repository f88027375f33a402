"""Axes without what a small panel has no use for: matplotlib's ticks, and limits that follow data.

The panels draw their own ticks and set their own limits (`look.frame`). To make the ticks that are
then not shown takes half of the time in which a panel is made.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.lines import Line2D


class _BareX(XAxis):
    def set_clip_path(self, *_: Any, **__: Any) -> None:
        """It has nothing to be clipped, and would make its ticks for that."""


class _BareY(YAxis):
    set_clip_path = _BareX.set_clip_path


class BareAxes(Axes):
    """Axes whose ticks are never made, and whose limits are set by hand."""

    name = "bare"

    def _init_axis(self) -> None:  # where matplotlib's own projections choose their axes too
        self.xaxis, self.yaxis = _BareX(self), _BareY(self)

    def tick_params(self, *_: Any, **__: Any) -> None:
        """There are none."""

    def grid(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def add_line(self, line: Line2D) -> Line2D:
        """Without a look at where it lies."""
        self.add_artist(line)
        return line
