"""`qrl simulate` with the reference model: one run, two, a sweep, the page."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_qrl.cli.simulating.assignments import read_axes
from lightning_qrl.cli.simulating.base import KEYS, Base, impossible, make_arm, make_base
from lightning_qrl.cli.simulating.showing import Screen, first_notes, show_json, waiting
from lightning_qrl.errors import UserError


def show(
    start: tuple[str | None, str | None, Sequence[str], Path | None],
    sweeps: Sequence[str],
    names: tuple[str, str] | None,
    file: Path | None,
    *,
    as_json: bool,
) -> None:
    """One run, two, a sweep, or the page.

    Args:
        start: preset, recipe, ``key=value``, calibration.
        sweeps: ``key=a..b``.
        names: of two runs.
        file: of the page.
        as_json: what is printed.
    """
    axes = read_sweep(sweeps)
    base = make_base(*start, axes)
    if file is not None:
        write(base, file)
    elif names is not None:
        compare(base, names, as_json=as_json)
    elif axes:
        sweep(base, axes, as_json=as_json)
    else:
        run(base, as_json=as_json)


def run(base: Base, *, as_json: bool) -> None:
    """One run: its timeline and its outcome."""
    from lightning_qrl.reports.simulation import idle_settings, outcome_text, trace_json

    trace, notes = base.simulate(base.settings())
    notes = (*notes, *idle_settings(trace.settings))
    if as_json:
        show_json(trace_json(trace, base.constants, notes=notes))
        return
    from lightning_qrl.reports.simulation_timeline import legend, timeline

    screen = Screen()
    width, glyphs = screen.width, screen.glyphs
    screen.show(
        _about(base, width),
        timeline(trace, width, glyphs, base.constants),
        legend(trace, width, glyphs),
        "\n",
        outcome_text(trace, width, base.constants),
        _notes(notes, width),
    )


def compare(common: Base, names: tuple[str, str], *, as_json: bool) -> None:
    """Two runs, side by side."""
    from lightning_qrl.reports.simulation import comparison_text, differences_text, trace_json
    from lightning_qrl.simulator.summary import summarize

    arms = [make_arm(name, common) for name in names]
    settings = [arm.settings() for arm in arms]
    traces, notes = zip(*(map(Base.simulate, arms, settings)), strict=True)
    constants = [arm.constants for arm in arms]
    if as_json:
        made = [
            {"name": arm.name, **trace_json(trace, of, notes=own, whole=False)}
            for arm, trace, of, own in zip(arms, traces, constants, notes, strict=True)
        ]
        show_json(dict(zip("AB", made, strict=True)))
        return
    from lightning_qrl.reports.simulation_timeline import legend, timeline

    screen = Screen()
    width, glyphs = screen.width, screen.glyphs
    for letter, arm, trace, of, own in zip("AB", arms, traces, constants, notes, strict=True):
        about = f"{arm.name}: {arm.about}" if arm.about else arm.name
        screen.show(_labelled(letter, about, width))
        screen.show(timeline(trace, width, glyphs, of), _notes(own, width), "\n")
    both = max(traces, key=lambda trace: (trace.diverged_at_step is not None, trace.discarded))
    a, b = map(summarize, traces, constants)
    screen.show(
        legend(both, width, glyphs),
        "\n",
        differences_text(*settings),
        "\n",
        comparison_text(a, b),
    )


def sweep(base: Base, axes: dict[str, list[Any]], *, as_json: bool) -> None:
    """A grid: a table over one setting, a heat map over two."""
    from lightning_qrl.reports.simulation import settings_text, summary_json
    from lightning_qrl.simulator.sweep import grid, of_reference
    from lightning_qrl.simulator.sweep import sweep as run_all

    with impossible():
        settings = grid(base.values, axes)
    fitted = base.fitted
    one = of_reference if fitted is None else fitted.outcome
    with waiting(f"{len(settings)} runs"):
        points = run_all(settings, list(axes), one)
    if as_json:
        made = [
            {"settings": asdict(p.settings), "notes": p.notes, **summary_json(p.summary)}
            for p in points
        ]
        show_json({"axes": axes, "notes": base.notes, "points": made})
        return
    from lightning_qrl.reports.simulation_sweep import reward_map, stable_text, sweep_table

    screen, names = Screen(), list(axes)
    if len(names) == 1:
        screen.show(sweep_table(points, names[0], screen.glyphs))
    else:
        screen.show(reward_map(points, names, screen.width, screen.glyphs))
    common = settings_text(settings[0], axes)
    screen.show(
        "\n",
        stable_text(points, names),
        _labelled("settings", common, screen.width),
        _about(base, screen.width),
        _notes(first_notes((base.notes, *(point.notes for point in points))), screen.width),
    )


def read_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The axes of a sweep, one or two."""
    axes = read_axes(texts, KEYS)
    if len(axes) > 2:
        raise UserError(f"--sweep takes one or two settings, got {', '.join(axes)}; fix the others")
    return axes


def write(base: Base, file: Path) -> None:
    """The interactive page, with these settings."""
    from lightning_qrl.simulator.page import write_page

    write_page(file, base.settings(), base.constants)
    print(f"page  {file}")
    notes = base.notes if base.fitted is None else (*base.notes, *base.fitted.notes_on_page())
    for note in notes:
        print(f"note  {note}")


def _about(base: Base, width: int) -> str:
    return _labelled("recipe", f"{base.name}: {base.about}", width) if base.about else ""


def _notes(notes: Sequence[str], width: int) -> str:
    return "".join(_labelled("note", note, width) for note in notes)


def _labelled(label: str, text: str, width: int) -> str:
    from lightning_qrl.reports.simulation import labelled

    return labelled({label: text}, width)
