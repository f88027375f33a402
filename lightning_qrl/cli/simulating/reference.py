"""`qrl simulate` with the reference model: one run, two, a sweep, the page."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lightning_qrl.cli.simulating.assignments import read_axes
from lightning_qrl.cli.simulating.base import Base, impossible, known_keys, make_arms, make_base
from lightning_qrl.cli.simulating.showing import Screen, first_notes, show_json, waiting
from lightning_qrl.errors import UserError
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.trace import Trace


def show(
    start: tuple[str | None, str | None, Sequence[str], Path | None],
    sweeps: Sequence[str],
    seeds: int | None,
    names: tuple[str, str] | None,
    file: Path | None,
    *,
    as_json: bool,
) -> None:
    """One run, two, a sweep, or the page.

    Args:
        start: preset, recipe, ``key=value``, calibration.
        sweeps: ``key=a..b``.
        seeds: of each setting; None: its own alone.
        names: of two runs.
        file: of the page.
        as_json: what is printed.
    """
    axes = read_sweep(sweeps, known_keys(start[3]))
    base = make_base(*start, axes)
    if file is not None:
        write(base, file)
    elif names is not None:
        compare(base, names, as_json=as_json)
    elif seeds is not None:
        from lightning_qrl.cli.simulating.seeds import show_seeds

        show_seeds(base, axes, seeds, as_json=as_json)
    elif axes:
        sweep(base, axes, as_json=as_json)
    else:
        run(base, as_json=as_json)


def run(base: Base, *, as_json: bool) -> None:
    """One run: its timeline and its outcome."""
    from lightning_qrl.reports.simulation import outcome_text, trace_json

    trace, notes = _run(base, base.settings())
    if as_json:
        show_json(trace_json(trace, base.constants, notes=notes))
        return
    from lightning_qrl.reports.simulation_timeline import legend, timeline

    screen = Screen()
    width, glyphs = screen.width, screen.glyphs
    screen.show(
        about(base, width),
        timeline(trace, width, glyphs, base.constants),
        legend(trace, width, glyphs),
        "\n",
        outcome_text(trace, width, base.constants),
        show_notes(notes, width),
    )


def compare(common: Base, names: tuple[str, str], *, as_json: bool) -> None:
    """Two runs, side by side."""
    from lightning_qrl.reports.simulation import comparison_text, differences_text, trace_json
    from lightning_qrl.simulator.summary import summarize

    arms = make_arms(names, common)
    settings = [arm.settings() for arm in arms]
    traces, notes = zip(*(map(_run, arms, settings)), strict=True)
    constants = [arm.constants for arm in arms]
    if as_json:
        made = [
            {"name": arm.name, **trace_json(trace, of, notes=own)}
            for arm, trace, of, own in zip(arms, traces, constants, notes, strict=True)
        ]
        show_json(dict(zip("AB", made, strict=True)))
        return
    from lightning_qrl.reports.simulation_timeline import legend, timeline

    screen = Screen()
    width, glyphs = screen.width, screen.glyphs
    for letter, arm, trace, of, own in zip("AB", arms, traces, constants, notes, strict=True):
        name = f"{arm.name}: {arm.about}" if arm.about else arm.name
        screen.show(labelled_text(letter, name, width))
        screen.show(timeline(trace, width, glyphs, of), show_notes(own, width), "\n")
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
        settings = grid(base.values, axes, base.kind)
    fitted = base.fitted
    one = of_reference if fitted is None else fitted.outcome
    with waiting(f"{len(settings)} runs"):
        points = run_all(settings, list(axes), one)
    notes = notes_on_sweep(base, settings, axes, [point.notes for point in points])
    if as_json:
        made = [
            {"settings": p.settings.shown(), "notes": p.notes, **summary_json(p.summary)}
            for p in points
        ]
        show_json({"axes": axes, "notes": notes, "points": made})
        return
    from lightning_qrl.reports.simulation_sweep import reward_map, stable_text, sweep_table

    screen, names = Screen(), list(axes)
    if len(names) == 1:
        screen.show(sweep_table(points, names[0], screen.width, screen.glyphs))
    else:
        screen.show(reward_map(points, names, screen.width, screen.glyphs))
    common = settings_text(settings[0], axes)
    screen.show(
        "\n",
        stable_text(points, names),
        labelled_text("settings", common, screen.width),
        about(base, screen.width),
        show_notes(notes, screen.width),
    )


def notes_on_sweep(
    base: Base,
    settings: Sequence[Settings],
    axes: Collection[str],
    of_points: Sequence[Sequence[str]],
) -> list[str]:
    """Notes on all runs of a sweep, each once."""
    from lightning_qrl.reports.simulation_notes import idle_notes

    without_effect = dict.fromkeys(note for one in settings for note in idle_notes(one, axes))
    return first_notes((base.notes, list(without_effect), *of_points))


def _run(base: Base, settings: Settings) -> tuple[Trace, tuple[str, ...]]:
    """A run, and notes on what its numbers hold for."""
    from lightning_qrl.reports.simulation_notes import idle_notes, lag_note

    trace, notes = base.simulate(settings)
    notes = (*notes, *idle_notes(settings))
    if base.lag is None or base.lag != settings.max_staleness:
        return trace, notes
    of_lag = lag_note(base.lag, trace, base.constants)
    return trace, notes if of_lag is None else (*notes, of_lag)


def read_sweep(texts: Sequence[str], known: Collection[str]) -> dict[str, list[Any]]:
    """The axes of a sweep, one or two."""
    axes = read_axes(texts, known)
    if len(axes) > 2:
        raise UserError(f"--sweep takes one or two settings, got {', '.join(axes)}; fix the others")
    return axes


def write(base: Base, file: Path) -> None:
    """The interactive page, with these settings."""
    from lightning_qrl.simulator.page import write_page

    write_page(file, base.settings())
    print(f"page  {file}")
    for note in base.notes:
        print(f"note  {note}")


def about(base: Base, width: int) -> str:
    """The recipe and its plan; nothing without one."""
    return labelled_text("recipe", f"{base.name}: {base.about}", width) if base.about else ""


def show_notes(notes: Sequence[str], width: int) -> str:
    """A line or more for each."""
    return "".join(labelled_text("note", note, width) for note in notes)


def labelled_text(label: str, text: str, width: int) -> str:
    """One text behind its label, wrapped."""
    from lightning_qrl.reports.simulation import labelled

    return labelled({label: text}, width)
