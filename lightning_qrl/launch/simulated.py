"""From a recipe to settings of the reference model: its precision plan and its staleness.

The plan is made as `qrl plan` makes it, on the meta device, and read row by row. The model knows
less than a recipe can say. What it does not know is never replaced in silence: where a setting does
not follow from the plan, it has to be given; where the recipe has more than the model, a note says
so.

The model's floors ("The 4-bitter Lesson") were measured on a mixture of experts, of which the
experts alone compute in low precision: MXFP8, or NVFP4.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_qrl.build import Run, build
from lightning_qrl.corrections.stack import Corrects
from lightning_qrl.data import RolloutData
from lightning_qrl.errors import UserError
from lightning_qrl.formats import Format
from lightning_qrl.launch.rehearsal import rehearse
from lightning_qrl.launch.simulated_rollouts import Rollouts, notes_on_rollouts
from lightning_qrl.precision import LinearPrecision, Row
from lightning_qrl.precision.select import PREDICATES, LastFraction, Linears, find_linears
from lightning_qrl.recipe import load_recipe

FORMATS = {"fp8_e4m3": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
BACKWARDS = ("high_precision", "dequantized")
TAIL = LastFraction(0.15)
TWO_FORMATS = "its trainer and its sampler compute in different formats"
NOT_NEAREST = ("rounding", "hadamard")  # options that change how a format errs


@dataclass(frozen=True, slots=True)
class Reading:
    """What a recipe says of a run of the reference model.

    Attributes:
        name: of the recipe.
        plan: its precision plan in one line.
        values: settings that follow from it.
        unknown: settings that do not, by their keys, with the reason.
        notes: what it has and the model has not.
        rollouts: how its samplers and its trainer go together.
    """

    name: str
    plan: str
    values: Mapping[str, Any]
    unknown: Mapping[str, str]
    notes: tuple[str, ...]
    rollouts: Rollouts

    def with_given(self, given: Mapping[str, Any], keys: Collection[str] = ()) -> dict[str, Any]:
        """Its settings, under those that are given.

        Args:
            given: settings.
            keys: further ones that will be set.

        Raises:
            UserError: one that does not follow from the recipe is not given.
        """
        missing = [key for key in self.unknown if key not in given and key not in keys]
        if missing:
            reasons = " and ".join(dict.fromkeys(self.unknown[key] for key in missing))
            example = " ".join(f"{key}={EXAMPLES[key]}" for key in missing)
            raise UserError(
                f"recipe {self.name}: {reasons}, which the model does not know; give the "
                f"{' and the '.join(missing)} to take for it, as in {example}"
            )
        return {**self.values, **given}


EXAMPLES = {
    "precision": "fp4",
    "backward": "dequantized",
    "four_over_six": "true",
    "bf16_tail": "true",
    "shared_experts": "false",
}


def read_recipe(name: str) -> Reading:
    """Read a recipe.

    Args:
        name: a shipped name or a path.

    Raises:
        UserError: there is no such recipe, something is wrong with it, or it has no rollouts.
    """
    recipe = load_recipe(name)
    run = build(recipe)
    if not isinstance(run.data, RolloutData):
        raise UserError(
            f"recipe {recipe.name} trains without rollouts: there is nothing to simulate"
        )
    plan = rehearse(run)
    linears = find_linears(run.module.policy.skeleton())
    rows = [row for row in plan.table() if row.layer in linears.decoder]
    quantized = [row for row in rows if row.quantized]
    rollouts = Rollouts.of(run, run.data)
    values: dict[str, Any] = {"max_staleness": rollouts.asynchrony.max_staleness}
    unknown: dict[str, str] = {}
    section = recipe.values.get("rollout", {})
    notes = [*notes_on_rollouts(name, rollouts, section, run.module.engine)]
    notes += _notes_on_training(run, run.data)
    if quantized:
        _read_formats(quantized, values, unknown)
        _read_layers(rows, linears, values, unknown)
        notes += _notes_on_layers(quantized, rows, linears)
    else:
        values["precision"] = "bf16"
        notes += _notes_on_16_bits(rows, str(run.trainer_args.get("precision", "32-true")))
    return Reading(recipe.name, plan.summary(), values, unknown, tuple(notes), rollouts)


def _read_formats(rows: Sequence[Row], values: dict[str, Any], unknown: dict[str, str]) -> None:
    """Precision, four-over-six and backward, from the layers that are quantized."""
    sides = [side for row in rows for side in (row.train, row.rollout)]
    weights, activations = ({_format(s, name) for s in sides} for name in ("weight", "activation"))
    names = {None if f is None else f.name for f in weights | activations}
    if any(_forward(row.train) != _forward(row.rollout) for row in rows):
        unknown["precision"] = TWO_FORMATS
    elif len(names) > 1:
        unknown["precision"] = (
            f"its weights are in {_named(weights)}, its activations in {_named(activations)}"
        )
    elif (only := names.pop()) not in FORMATS:
        unknown["precision"] = f"it computes in {only}"
    else:
        values["precision"] = FORMATS[only]
    low = [f for f in weights | activations if f is not None and f.bits < 16]
    chooses = {getattr(f, "four_over_six", "none") != "none" for f in low}
    if len(chooses) > 1:
        unknown["four_over_six"] = "a part of its operands is quantized with four-over-six"
    else:
        values["four_over_six"] = chooses.pop()
    backwards = {row.train.backward for row in rows if row.train is not None}
    if len(backwards) == 1 and backwards <= {*BACKWARDS}:
        values["backward"] = backwards.pop()
    elif backwards:
        unknown["backward"] = f"its backward is {' and '.join(sorted(backwards))}"
    else:
        unknown["backward"] = TWO_FORMATS  # the trainer quantizes nothing


def _read_layers(
    rows: Sequence[Row], linears: Linears, values: dict[str, Any], unknown: dict[str, str]
) -> None:
    """The tail and the shared experts, from the layers that are not quantized."""
    tail, published = _tail(_whole(rows, linears), linears.layers), TAIL.count(linears.layers)
    if tail in (0, published):
        values["bf16_tail"] = tail > 0
    else:
        unknown["bf16_tail"] = (
            f"the last {tail} of its {linears.layers} layers are not quantized, and the last 15% "
            f"are {published}"
        )
    before = [row for row in rows if linears.decoder[row.layer] < linears.layers - tail]
    shared = {row.quantized for row in before if PREDICATES["shared_experts"](row.layer)}
    if len(shared) > 1:
        unknown["shared_experts"] = "a part of its shared experts is quantized"
    else:
        values["shared_experts"] = shared == {False}


def _whole(rows: Sequence[Row], linears: Linears) -> frozenset[int]:
    """Decoder layers in which nothing is quantized."""
    quantized = {linears.decoder[row.layer] for row in rows if row.quantized}
    return frozenset(range(linears.layers)) - quantized


def _tail(whole: frozenset[int], layers: int) -> int:
    """How many layers at the end are whole."""
    return next(count for count in range(layers) if layers - 1 - count not in whole)


def _notes_on_layers(
    quantized: Sequence[Row], rows: Sequence[Row], linears: Linears
) -> Iterator[str]:
    both = (f for row in quantized for f in _forward(row.train) + _forward(row.rollout))
    formats = {f for f in both if f is not None}
    if any(f.name == "fp8_e4m3" for f in formats):
        yield "the model's fp8 is MXFP8, the recipe's is fp8_e4m3"
    odd = {
        f"{option.name}={getattr(f, option.name)}"
        for f in formats
        for option in f.options()
        if option.name in NOT_NEAREST and getattr(f, option.name) != option.default
    }
    if odd:
        yield f"the model does not know {', '.join(sorted(odd))}"
    if not any(PREDICATES["experts"](row.layer) for row in rows):
        yield "the policy is dense; the model's floors were measured on a mixture of experts"
    if any(PREDICATES["attention"](row.layer) for row in quantized):
        yield "attention is quantized too, which the model's floors do not count"
    whole = _whole(rows, linears)
    early = sorted(whole)[: len(whole) - _tail(whole, linears.layers)]
    if early:
        yield (
            f"decoder layers that are not quantized either: {', '.join(map(str, early))}; the "
            "model's floors do not count them"
        )


def _notes_on_training(run: Run, data: RolloutData) -> Iterator[str]:
    updates = data.regime(1).updates
    if updates > 1:
        yield f"it takes {updates} optimizer steps on one rollout, the model takes one"
    correcting = [key for key, callback in run.callbacks.items() if isinstance(callback, Corrects)]
    if correcting:
        yield f"the model does not know what {', '.join(correcting)} corrects"


def _notes_on_16_bits(rows: Sequence[Row], trainer: str) -> Iterator[str]:
    formats = {f for row in rows for s in (row.train, row.rollout) for f in _forward(s)}
    names = {trainer if f is None else f.name for f in formats}
    other = sorted(name for name in names if not name.startswith("bf16"))
    if other:
        yield f"it computes in {' and '.join(other)}, which the model does not know: taken as bf16"


def _forward(precision: LinearPrecision | None) -> tuple[Format | None, Format | None]:
    return (None, None) if precision is None else (precision.weight, precision.activation)


def _format(precision: LinearPrecision | None, operand: str) -> Format | None:
    return None if precision is None else getattr(precision, operand)


def _named(formats: set[Format | None]) -> str:
    return " and ".join(sorted("none" if f is None else f.name for f in formats))
