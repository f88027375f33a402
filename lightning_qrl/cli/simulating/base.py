"""Where a run of the reference model starts from: a preset or a recipe, under KEY=VALUE."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_qrl.cli.quiet import quiet_imports
from lightning_qrl.cli.simulating.assignments import read_assignments
from lightning_qrl.errors import UserError
from lightning_qrl.simulator.constants import POST, Constants
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings
from lightning_qrl.simulator.trace import Trace

if TYPE_CHECKING:
    from lightning_qrl.cli.simulating.calibration import Fitted
    from lightning_qrl.simulator.calibrated import Calibration

KEYS = tuple(item.name for item in fields(Settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a run starts from.

    Attributes:
        name: of the preset or the recipe, or the settings themselves; empty for the defaults.
        values: settings, over the defaults.
        about: the recipe's precision plan, in one line; else empty.
        notes: on what the numbers hold for.
        calibration: takes the place of the post's numbers.
        plan: of the calibration.
    """

    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    notes: tuple[str, ...] = ()
    calibration: "Calibration | None" = None
    plan: Any = None

    @property
    def fitted(self) -> "Fitted | None":
        """The calibration's numbers for the plan.

        Raises:
            UserError: there is no such plan.
        """
        if self.calibration is None:
            return None
        from lightning_qrl.cli.simulating.calibration import Fitted, plan_of

        return Fitted(self.calibration, plan_of(self.calibration, self.plan))

    @property
    def constants(self) -> Constants:
        """Of the model."""
        fitted = self.fitted
        return POST if fitted is None else fitted.constants

    def simulate(self, settings: Settings) -> tuple[Trace, tuple[str, ...]]:
        """A run, and notes on what its numbers hold for."""
        fitted = self.fitted
        if fitted is None:
            return simulate(settings), self.notes
        trace, notes = fitted.simulate(settings)
        return trace, (*self.notes, *notes)

    def settings(self) -> Settings:
        """The settings of a single run.

        Raises:
            UserError: they are impossible.
        """
        with impossible():
            return Settings(**self.values)


@contextmanager
def impossible() -> Iterator[None]:
    """Turn what settings refuse into a `UserError`; it names the key and what to do."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None


def make_base(
    preset: str | None,
    recipe: str | None,
    overrides: Sequence[str],
    calibration: Path | None,
    axes: Collection[str] = (),
) -> Base:
    """Lay the settings over one another.

    Args:
        preset: its name.
        recipe: its name or path.
        overrides: ``key=value``; with a calibration ``plan=name`` too.
        calibration: its file.
        axes: settings that a sweep will set.

    Raises:
        UserError: something is unknown, or does nothing.
    """
    given = read_assignments(overrides, _known(calibration))
    for key in axes:
        if key in given:
            raise UserError(f"--sweep {key}: {key}={given[key]} says it too; take one of them out")
    if calibration is not None:
        _check_floors({*given, *axes})
    plan = given.pop("plan", None)
    base = Base(values=given)
    if preset is not None:
        base = _of_preset("--preset", preset, given)
    elif recipe is not None:
        base = _of_recipe(recipe, given, axes)
    if calibration is None:
        return base
    from lightning_qrl.cli.simulating.calibration import read_calibration

    return replace(base, calibration=read_calibration(calibration), plan=plan)


def make_arm(text: str, common: Base) -> Base:
    """One side of a comparison: a preset, settings, or a recipe.

    Raises:
        UserError: it is none, or says what KEY=VALUE says too.
    """
    if text in PRESETS:
        arm = _of_preset("--compare", text, common.values)
    elif "=" in text:
        arm = _of_settings(text, common)
    else:
        _check_recipe(text)
        arm = _of_recipe(text, common.values, ())
    plan = common.plan if arm.plan is None else arm.plan
    return replace(arm, calibration=common.calibration, plan=plan)


def _known(calibration: object) -> list[str]:
    """Keys that may be given."""
    return [*KEYS] if calibration is None else [*KEYS, "plan"]


def _check_floors(given: Collection[str]) -> None:
    for key in ("bf16_tail", "shared_experts", "four_over_six"):
        if key in given:
            raise UserError(
                f"{key} does nothing with --calibration, where each plan has its own floor; "
                "take it out"
            )


def _of_preset(option: str, name: str, given: Mapping[str, Any]) -> Base:
    from lightning_qrl.plugins import nearest

    if name not in PRESETS:
        raise UserError(f"{option} {name}: no such preset; {nearest(name, [*PRESETS])}")
    return Base(name=name, values={**PRESETS[name], **given})


def _of_settings(text: str, common: Base) -> Base:
    from lightning_qrl.ablation.factors import split_values

    try:
        own = read_assignments(split_values(text), _known(common.calibration))
    except ValueError as error:
        said = str(error).removeprefix("command line: ")
        raise UserError(f"--compare {text}: {said}") from None
    if common.calibration is not None:
        _check_floors(own)
    for key in own.keys() & {*common.values, *([] if common.plan is None else ["plan"])}:
        raise UserError(f"--compare {text}: {key} is given for both sides too; take one out")
    plan = own.pop("plan", None)
    return Base(name=text, values={**common.values, **own}, plan=plan)


def _check_recipe(name: str) -> None:
    """Raise UserError where a side of a comparison is neither a preset nor a recipe."""
    from lightning_qrl.plugins import nearest
    from lightning_qrl.recipe import find_recipe, recipe_names

    try:
        find_recipe(name)
    except UserError:
        near = nearest(name, [*PRESETS, *recipe_names()])
        message = f"--compare {name}: neither a preset, nor a recipe, nor key=value; {near}"
        raise UserError(message) from None


def _of_recipe(name: str, given: Mapping[str, Any], axes: Collection[str]) -> Base:
    from lightning_qrl.recipe import find_recipe

    find_recipe(name)  # before anything heavy is imported
    with quiet_imports():
        from lightning_qrl.launch.simulated import read_recipe

    found = read_recipe(name)
    return Base(
        name=found.name, values=found.with_given(given, axes), about=found.plan, notes=found.notes
    )
