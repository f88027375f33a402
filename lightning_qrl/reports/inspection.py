"""What `qrl inspect` shows: the quantization error of each weight, as a table and as a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_qrl.analysis.quantization_error import QuantizationError, pool
from lightning_qrl.reports.figures import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    SKY,
    VERMILION,
    drawn,
)
from lightning_qrl.reports.tables import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = (
    "layer", "shape", "SQNR dB", "rel. error", "saturated", "underflow",
    "scale", "deadzone", "grid", "cross", "s/s*", "gain",
)  # fmt: skip
PARTS = (("scale", BLUE), ("deadzone", ORANGE), ("grid", SKY))


@dataclass(frozen=True, slots=True)
class WeightError:
    """The quantization error of one weight.

    Attributes:
        name: of the layer.
        layer: index of its decoder layer.
        kind: what it is in each decoder layer.
        shape: of the weight.
        error: what the format does to it.
    """

    name: str
    layer: int
    kind: str
    shape: tuple[int, ...]
    error: QuantizationError


def inspection_text(weights: Sequence[WeightError]) -> str:
    """One line a weight, and one for all of them together."""
    rows = [(w.name, "x".join(map(str, w.shape)), *_cells(w.error)) for w in weights]
    total = pool(w.error for w in weights)
    return text_table(HEADINGS, [*rows, ("all", "", *_cells(total))], left=2)


def _cells(error: QuantizationError) -> tuple[str, ...]:
    shares = error.shares
    parts = [shares[name] for name, _ in PARTS]
    return (
        f"{error.sqnr_db:.2f}",
        f"{error.relative_error:.4f}",
        f"{error.fraction('saturated'):.2%}",
        f"{error.fraction('underflowed'):.2%}",
        *(f"{part:.3f}" for part in parts),
        f"{_cross(error):.3f}",
        f"{error.mean_scale_gain:.3f}",
        f"{error.gain:.4f}",
    )


def _cross(error: QuantizationError) -> float:
    """The cross terms together, as a share."""
    return sum(share for name, share in error.shares.items() if "_" in name)


def draw_inspection(file: Path, title: str, weights: Sequence[WeightError]) -> None:
    """Draw SQNR by depth, what the error consists of, and what is lost at both ends.

    Args:
        file: the picture.
        title: above it.
        weights: every weight's error.
    """
    kinds = list(dict.fromkeys(weight.kind for weight in weights))
    pooled = {k: pool(w.error for w in weights if w.kind == k) for k in reversed(kinds)}
    tall = 0.9 + 0.24 * len(kinds)
    with drawn(file, title, 7.5, [3.0, tall, tall]) as (depth, parts, ends):
        _draw_depth(depth, kinds, weights)
        _draw_parts(parts, pooled)
        _draw_ends(ends, pooled)
        for panel in (depth, parts, ends):
            panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_depth(depth: "Axes", kinds: Sequence[str], weights: Sequence[WeightError]) -> None:
    from matplotlib.ticker import MaxNLocator

    for i, kind in enumerate(kinds):
        own = [w for w in weights if w.kind == kind]
        depth.plot(
            [w.layer for w in own], [w.error.sqnr_db for w in own], lw=1.2, ms=4, label=kind,
            color=CYCLE[i % len(CYCLE)], marker=MARKERS[i % len(MARKERS)],
        )  # fmt: skip
    depth.set(title="How much survives", xlabel="decoder layer", ylabel="SQNR (dB)")
    depth.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_parts(parts: "Axes", pooled: Mapping[str, QuantizationError]) -> None:
    left = [0.0] * len(pooled)
    for part, color in PARTS:
        shares = [error.shares[part] for error in pooled.values()]
        parts.barh([*pooled], shares, left=left, height=0.65, color=color, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    cross = [_cross(error) for error in pooled.values()]
    parts.barh([*pooled], cross, height=0.65, color=GREY, label="cross terms")
    parts.axvline(0, color="black", lw=0.8)
    parts.set(title="What the error consists of", xlabel="share of the squared error; sums to 1")


def _draw_ends(ends: "Axes", pooled: Mapping[str, QuantizationError]) -> None:
    places = range(len(pooled))
    for offset, count, color in ((0.16, "underflowed", GREEN), (-0.16, "saturated", VERMILION)):
        ends.barh(
            [place + offset for place in places],
            [100 * error.fraction(count) for error in pooled.values()],
            height=0.32, color=color, label=count,
        )  # fmt: skip
    ends.set_yticks(places, [*pooled])
    ends.set(title="What is lost at both ends", xlabel="weights (%)")
