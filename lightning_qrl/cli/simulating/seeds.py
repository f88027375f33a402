"""`qrl simulate --seeds`: each setting with many seeds, so that chance is told from effect."""

from itertools import product
from typing import Any

from lightning_qrl.cli.simulating.assignments import MOST
from lightning_qrl.cli.simulating.base import Base, impossible
from lightning_qrl.cli.simulating.reference import about, labelled_text, notes_on_sweep, show_notes
from lightning_qrl.cli.simulating.showing import Screen, show_json, waiting
from lightning_qrl.errors import UserError


def show_seeds(base: Base, axes: dict[str, list[Any]], count: int, *, as_json: bool) -> None:
    """One setting, or a sweep, over seeds; they start at the settings' own."""
    from dataclasses import asdict

    from lightning_qrl.simulator.seeds import over_seeds
    from lightning_qrl.simulator.sweep import grid, of_reference

    with impossible():
        settings = grid(base.values, axes, base.kind)
    _check(count, len(settings), axes)
    one = of_reference if base.fitted is None else base.fitted.outcome
    with waiting(f"{count * len(settings)} runs"), impossible():
        made = [over_seeds(each, count, one) for each in settings]
    found = dict(zip(product(*axes.values()), (seeds for seeds, _ in made), strict=True))
    notes = notes_on_sweep(base, settings, axes, [own for _, own in made])
    if as_json:
        points = [
            {"settings": each.shown(), **asdict(seeds)}
            for each, (seeds, _) in zip(settings, made, strict=True)
        ]
        show_json({"axes": axes, "notes": notes, "points": points})
        return
    from lightning_qrl.reports import simulation_seeds as report
    from lightning_qrl.reports.simulation import settings_text
    from lightning_qrl.simulator.closed_forms import critical_effective

    screen, names = Screen(), list(axes)
    width, glyphs = screen.width, screen.glyphs
    if len(names) == 2:
        screen.show(report.seeds_map(found, names, width, glyphs), "\n")
    elif names:
        screen.show(report.seeds_table(found, names[0], width, glyphs), "\n")
    limited = critical_effective(base.learning) != float("inf")
    screen.show(
        labelled_text("settings", settings_text(settings[0], {*axes, "seed"}), width),
        about(base, width),
        "" if names else report.seeds_text(made[0][0], width, stability=limited),
        labelled_text("seeds", f"{count}, from {settings[0].seed} up", width) if names else "",
        show_notes(notes, width),
    )


def _check(count: int, cells: int, axes: dict[str, list[Any]]) -> None:
    if count < 2:
        raise UserError(f"--seeds must be at least 2, got {count}")
    if "seed" in axes:
        raise UserError("--seeds and --sweep seed both say which seeds; take one of them out")
    if count * cells > MOST:
        raise UserError(
            f"--seeds {count}: more than {MOST} runs in all; take fewer seeds, or fewer values"
        )
