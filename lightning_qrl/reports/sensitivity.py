"""What `qrl sensitivity` shows: the ranking, the way to more protection, and both as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_qrl.analysis.sensitivity import Estimate, GroupCost, Sensitivity, Spared
from lightning_qrl.reports.figures import BLUE, GREY, VERMILION, drawn
from lightning_qrl.reports.tables import kib, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = (
    "group", "layers", "KiB", "KiB in BF16", "alone [95%]", "saved [95%]", "saved per MiB"
)  # fmt: skip
MIB = 2**20
LABEL_SPACE = 0.03  # of the width, between two labels


def headline(measured: Sensitivity) -> str:
    """What was measured, in one line."""
    return (
        f"mean |Δlogprob| {measured.cost(measured.everything)} against BF16, on "
        f"{measured.completions} completions of {measured.tokens} tokens "
        "(intervals: 95% bootstrap over completions)"
    )


def ends_text(measured: Sensitivity) -> list[str]:
    """Whether the last layers are worth more than the first ones; a line for each fraction."""
    ends = [(name, name.replace("last ", "first ")) for name in measured.groups if "last " in name]
    return [
        difference_text(last, first, measured.difference(last, first))
        for last, first in ends
        if first in measured.groups
    ]


def ranking_text(ranking: Sequence[GroupCost]) -> str:
    """One line a group; ``alone`` and ``saved`` are mean |Δlogprob|."""
    rows = [
        (
            cost.name,
            str(cost.layers),
            kib(cost.quantized_bytes),
            kib(cost.quantized_bytes + cost.extra_bytes),
            str(cost.alone),
            str(cost.saved),
            f"{cost.saved_per_byte * MIB:.4f}",
        )
        for cost in ranking
    ]
    return text_table(HEADINGS, rows)


def walk_text(walk: Sequence[Spared]) -> str:
    """One line a step: what is spared too, what all of it adds, and what is left of the cost."""
    rows = [
        (f"+ {step.groups[-1]}" if step.groups else "nothing", kib(step.extra_bytes),
         str(step.cost), f"{_taken_off(step, walk):.0%}")
        for step in walk
    ]  # fmt: skip
    return text_table(("in BF16", "KiB more", "|Δlogprob| [95%]", "taken off"), rows)


def choice_text(chosen: Spared, walk: Sequence[Spared]) -> str:
    """The choice in one line."""
    return (
        f"{', '.join(chosen.groups) or 'nothing'} in BF16: mean |Δlogprob| "
        f"{walk[0].cost.value:.4f} -> {chosen.cost.value:.4f} ({_taken_off(chosen, walk):.0%} "
        f"taken off) for {kib(chosen.extra_bytes)} KiB more weights "
        f"(everything: {kib(walk[-1].extra_bytes)})"
    )


def difference_text(group: str, other: str, more: Estimate) -> str:
    """Which of two groups is worth more, in one line."""
    low, high = sorted((abs(more.low), abs(more.high)))
    if more.low <= 0 <= more.high:
        return f"sparing the {group} and the {other} saves alike: difference {more}"
    word = "more" if more.value > 0 else "less"
    return (
        f"sparing the {group} saves {abs(more.value):.4f} [{low:.4f}, {high:.4f}] {word} "
        f"than sparing the {other}"
    )


def _taken_off(step: Spared, walk: Sequence[Spared]) -> float:
    before = walk[0].cost.value
    return 1 - step.cost.value / before if before else 0.0


def draw_sensitivity(
    file: Path, title: str, ranking: Sequence[GroupCost], walk: Sequence[Spared], chosen: Spared
) -> None:
    """The way to more protection, as cost against bytes; and what sparing each group alone saves.

    Args:
        file: the picture.
        title: above it.
        ranking: every group.
        walk: from nothing spared to everything.
        chosen: marked.
    """
    with drawn(file, title, 7.5, [3.6, 0.6 + 0.21 * len(ranking)]) as (pareto, groups):
        _draw_walk(pareto, ranking, walk, chosen)
        _draw_groups(groups, ranking)


def _draw_walk(
    pareto: "Axes", ranking: Sequence[GroupCost], walk: Sequence[Spared], chosen: Spared
) -> None:
    before = walk[0].cost.value
    pareto.scatter(
        [cost.extra_bytes / MIB for cost in ranking],
        [before - cost.saved.value for cost in ranking],
        s=16, color=GREY, alpha=0.6, label="one group in BF16",
    )  # fmt: skip
    sizes = [step.extra_bytes / MIB for step in walk]
    values = [step.cost.value for step in walk]
    bars = [[step.cost.value - step.cost.low for step in walk],
            [step.cost.high - step.cost.value for step in walk]]  # fmt: skip
    pareto.errorbar(
        sizes, values, bars, color=BLUE, marker="o", ms=4, lw=1.5, elinewidth=0.8,
        label="most saved per byte next",
    )  # fmt: skip
    labelled = 0.0
    for step, size, value in zip(walk[1:], sizes[1:], values[1:], strict=True):
        if size - labelled >= LABEL_SPACE * sizes[-1]:
            pareto.annotate(
                f"+ {step.groups[-1]}", (size, value), (5, 5), textcoords="offset points",
                fontsize=7.5, rotation=20,
            )  # fmt: skip
            labelled = size
    pareto.plot(
        chosen.extra_bytes / MIB, chosen.cost.value, "o", ms=12, mfc="none", mew=1.8,
        color=VERMILION, label="chosen", ls="none",
    )  # fmt: skip
    pareto.set(title="What protection costs", xlabel="weights in BF16 add (MiB)",
               ylabel="mean |Δlogprob|", ylim=(-0.03 * before, 1.2 * before))  # fmt: skip
    pareto.legend(loc="upper right")


def _draw_groups(groups: "Axes", ranking: Sequence[GroupCost]) -> None:
    order = sorted(ranking, key=lambda cost: cost.saved.value)
    bounds = [[cost.saved.value - cost.saved.low for cost in order],
              [cost.saved.high - cost.saved.value for cost in order]]  # fmt: skip
    groups.errorbar(
        [cost.saved.value for cost in order], [cost.name for cost in order], xerr=bounds,
        fmt="o", color=BLUE, ms=4, elinewidth=1,
    )  # fmt: skip
    groups.axvline(0, color=GREY, lw=0.8)
    groups.set(title="What sparing one group alone takes off",
               xlabel="mean |Δlogprob|, 95% interval", ylim=(-0.7, len(order) - 0.3))  # fmt: skip
