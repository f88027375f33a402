"""Where a run of the reference model starts from: a preset or a recipe, under KEY=VALUE."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning_qrl.cli.quiet import quiet_imports
from lightning_qrl.cli.simulating.assignments import read_assignments
from lightning_qrl.errors import UserError
from lightning_qrl.simulator.constants import POST, Constants, Learning
from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import PRESETS, Settings
from lightning_qrl.simulator.trace import Trace
from lightning_qrl.simulator.words import plain

if TYPE_CHECKING:
    from lightning_qrl.cli.simulating.calibration import Fitted
    from lightning_qrl.simulator.calibrated import Calibration

KEYS = tuple(item.name for item in fields(Settings))
OF_PLAN = "with --calibration the plan says what precision does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a run starts from.

    Attributes:
        name: of the preset or the recipe, or the settings themselves; empty for the defaults.
        values: settings, over the defaults.
        about: the recipe's precision plan, in one line; else empty.
        notes: on what the numbers hold for.
        lag: versions that each rollout of the recipe is behind; None where that varies.
        calibration: takes the place of the post's numbers; ``plan`` is then one of the values.
    """

    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    notes: tuple[str, ...] = ()
    lag: int | None = None
    calibration: "Calibration | None" = None

    @property
    def fitted(self) -> "Fitted | None":
        """The calibration's numbers in the reference model."""
        if self.calibration is None:
            return None
        from lightning_qrl.cli.simulating.calibration import Fitted

        return Fitted(self.calibration)

    @property
    def kind(self) -> Callable[..., Settings]:
        """Makes the settings of a run from values."""
        fitted = self.fitted
        return Settings if fitted is None else fitted.settings

    @property
    def constants(self) -> Constants:
        """Of the model.

        Raises:
            UserError: the calibration does not have the plan.
        """
        fitted = self.fitted
        return POST if fitted is None else fitted.constants(plain(self.values.get("plan")))

    @property
    def learning(self) -> Learning:
        """Of the model, whatever the plan."""
        return POST.learning if self.calibration is None else self.calibration.learning

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
            return self.kind(**self.values)


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
    axes: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> Base:
    """Lay the settings over one another.

    Args:
        preset: its name.
        recipe: its name or path.
        overrides: ``key=value``; with a calibration ``plan=name`` too.
        calibration: its file.
        axes: what a sweep will set, with the values.

    Raises:
        UserError: something is unknown, or does nothing.
    """
    given = read_assignments(overrides, known_keys(calibration))
    for key in axes:
        if key in given:
            said = f"{key}={plain(given[key])}"
            raise UserError(f"--sweep {key}: {said} says it too; take one of them out")
    if calibration is not None:
        from lightning_qrl.cli.simulating.calibration import read_calibration

        _check_plans(preset=preset, recipe=recipe, given={*given, *axes})
        return Base(values=given, calibration=read_calibration(calibration))
    base = Base(values=given)
    if preset is not None:
        base = _of_preset("--preset", preset, given)
    elif recipe is not None:
        check_before_building(recipe, given, axes)
        base = _of_recipe(recipe, given, axes)
    return base


def make_arms(texts: Sequence[str], common: Base) -> list[Base]:
    """Both sides of a comparison; what is wrong with either is said before a recipe is built."""
    recipes = [text for text in texts if "=" not in text and text not in PRESETS]
    if common.calibration is None:
        for text in recipes:
            _check_recipe(text)
            check_before_building(text, common.values, {})
    made = {}
    for text in sorted(texts, key=recipes.__contains__):
        made[text] = make_arm(text, common)
        made[text].settings()
    return [made[text] for text in texts]


def make_arm(text: str, common: Base) -> Base:
    """One side of a comparison: a preset, settings, or a recipe.

    Raises:
        UserError: it is none, or says what KEY=VALUE says too.
    """
    if common.calibration is not None and "=" not in text:
        raise UserError(f"--compare {text}: {OF_PLAN}; compare settings, as plan=A and plan=B")
    if text in PRESETS:
        arm = _of_preset("--compare", text, common.values)
    elif "=" in text:
        arm = _of_settings(text, common)
    else:
        arm = _of_recipe(text, common.values, ())
    return replace(arm, calibration=common.calibration)


def known_keys(calibration: object) -> list[str]:
    """Settings that may be given, with a calibration or without one."""
    return [*KEYS] if calibration is None else [*KEYS, "plan"]


def _check_plans(*, preset: str | None, recipe: str | None, given: Collection[str]) -> None:
    """Raise UserError for what says the precision that a calibration's plan says."""
    from lightning_qrl.simulator.calibrated.settings import OF_PLAN as keys

    for option, name in (("--preset", preset), ("--recipe", recipe)):
        if name is not None:
            raise UserError(f"{option} {name}: {OF_PLAN}; give plan=NAME in its place")
    for key in keys:
        if key in given:
            raise UserError(f"{key}: {OF_PLAN}; take it out, and give plan=NAME")


def _of_preset(option: str, name: str, given: Mapping[str, Any]) -> Base:
    from lightning_qrl.plugins import nearest

    if name not in PRESETS:
        raise UserError(f"{option} {name}: no such preset; {nearest(name, [*PRESETS])}")
    return Base(name=name, values={**PRESETS[name], **given})


def _of_settings(text: str, common: Base) -> Base:
    from lightning_qrl.ablation.factors import split_values

    try:
        own = read_assignments(split_values(text), known_keys(common.calibration))
    except ValueError as error:
        said = str(error).removeprefix("command line: ")
        raise UserError(f"--compare {text}: {said}") from None
    if common.calibration is not None:
        _check_plans(preset=None, recipe=None, given=own)
    for key in own.keys() & common.values.keys():
        raise UserError(f"--compare {text}: {key} is given for both sides too; take one out")
    return Base(name=text, values={**common.values, **own})


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


def check_before_building(
    name: str, given: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]
) -> None:
    """Raise UserError for what can be seen without building the recipe, which takes seconds."""
    from lightning_qrl.recipe import load_recipe

    methods = load_recipe(name).values.keys() & {"grpo", "supervised"}
    if methods == {"supervised"}:
        raise UserError(f"recipe {name} trains without rollouts: there is nothing to simulate")
    if not methods:
        raise UserError(f"recipe {name} has no section grpo: there is nothing to simulate")
    with impossible():
        Settings(**given)
        for key, values in axes.items():
            for value in values:
                Settings(**{key: value})


def _of_recipe(name: str, given: Mapping[str, Any], axes: Collection[str]) -> Base:
    with quiet_imports():
        from lightning_qrl.launch.simulated import read_recipe

    found = read_recipe(name)
    return Base(
        name=found.name,
        values=found.with_given(given, axes),
        about=found.plan,
        notes=found.notes,
        lag=found.rollouts.lag,
    )
