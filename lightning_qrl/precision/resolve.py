"""From rules to rows: what the rules of a plan mean for each linear layer of a model."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_qrl.errors import UserError
from lightning_qrl.formats import Format, get_format
from lightning_qrl.precision.backends import Chip, settle
from lightning_qrl.precision.experts import why_not
from lightning_qrl.precision.full import FP32
from lightning_qrl.precision.linear import LinearPrecision
from lightning_qrl.precision.select import Selector, find_linears, linear_shapes, select
from lightning_qrl.precision.sides import SIDES, Side

Field = Format | str
_BF16 = get_format("bf16")
BF16 = LinearPrecision(_BF16, _BF16, _BF16, backward="quantized")


@dataclass(frozen=True, slots=True)
class Rule:
    """One field that one callback asks for.

    Attributes:
        where: the layers.
        by: the callback.
        sides: where it holds.
        field: a field of `LinearPrecision`, or ``"keep"``.
        value: of the field.
    """

    where: Selector
    by: str
    sides: tuple[Side, ...]
    field: str
    value: Field


@dataclass(frozen=True, slots=True)
class Row:
    """What one linear layer computes in.

    Attributes:
        layer: full name of a module, or of a fused parameter of experts.
        shape: (O, I), or (E, O, I) of fused experts.
        train: precision while training; None is the plain layer in the trainer's precision.
        rollout: precision while sampling.
        kept_by: callbacks that keep the layer in BF16 or FP32, sorted.
        weight_decay: whether the optimizer's weight decay applies.
        note: anything else worth knowing, such as a tied weight.
        why: the reason for the backend of its precisions.
    """

    layer: str
    shape: tuple[int, ...]
    train: LinearPrecision | None
    rollout: LinearPrecision | None
    kept_by: tuple[str, ...]
    weight_decay: bool
    note: str = ""
    why: str = ""

    @property
    def fused(self) -> bool:
        """Whether it is a fused parameter of experts."""
        return len(self.shape) == 3

    @property
    def parameter(self) -> str:
        """Full name of the weight."""
        return self.layer if self.fused else f"{self.layer}.weight"

    @property
    def quantized(self) -> bool:
        """Whether an operand has fewer than 16 bits, on either side."""
        return any(p is not None and p.quantized for p in (self.train, self.rollout))


def resolve(rules: set[Rule], model: nn.Module, chip: Chip, *, no_decay: bool) -> tuple[Row, ...]:
    """One row a linear layer, in the model's order.

    Args:
        rules: what is asked.
        model: its layers are looked at, not touched.
        chip: what it will compute on; decides the backends.
        no_decay: exempt quantized weights from weight decay.

    Raises:
        UserError: a selector matches nothing, two callbacks disagree, or a layer or a backend
            cannot do what is asked of it.
        ValueError: rules are asked of a model without linear decoder layers.
    """
    ordered = sorted(rules, key=lambda r: (r.by, r.field, str(r.where), str(r.value)))
    meant = _select(ordered, model)
    tied = _tied_names(model)
    rows = []
    for name, shape in linear_shapes(model).items():
        row = _row(name, shape, [r for r in ordered if name in meant[r.where]], chip)
        if row.fused and (row.train or row.rollout):
            _check_experts(row, model)
        decay = not (no_decay and row.quantized)
        note = "weight tied to the embedding" if name in tied else ""
        rows.append(replace(row, weight_decay=decay, note=note))
    return tuple(rows)


def _row(name: str, shape: tuple[int, ...], rules: list[Rule], chip: Chip) -> Row:
    keepers = tuple(dict.fromkeys(r.by for r in rules if r.field == "keep"))
    asked = [_merge(name, rules, side) for side in SIDES]
    try:
        (train, rollout), why = settle(asked, shape, chip)
    except ValueError as error:
        by = " and ".join(dict.fromkeys(r.by for r in rules if r.field == "backend"))
        raise UserError(f"{by}: {name}: {error}") from None
    return Row(
        layer=name,
        shape=shape,
        train=train,
        rollout=rollout,
        kept_by=() if train is None and rollout is None else keepers,
        weight_decay=True,
        why=why,
    )


def _select(rules: list[Rule], model: nn.Module) -> dict[Selector, frozenset[str]]:
    """The layers that each selector means; a model that nothing is asked of may be any."""
    if not rules:
        return {}
    linears = find_linears(model)
    meant: dict[Selector, frozenset[str]] = {}
    for rule in rules:
        try:
            meant[rule.where] = select(rule.where, linears)
        except ValueError as error:
            raise UserError(f"{rule.by}: {error}") from None
    return meant


def _merge(layer: str, rules: list[Rule], side: Side) -> LinearPrecision | None:
    """What the rules ask on one side of one layer; None when that is nothing."""
    asked: dict[str, Rule] = {}
    for rule in rules:
        if side not in rule.sides:
            continue
        first = asked.setdefault(rule.field, rule)
        if first.value != rule.value:
            raise UserError(
                f"{first.by} and {rule.by} disagree on the {rule.field} of {layer} "
                f"({side} side): {first.value} or {rule.value}; remove one of them"
            )
    keep = asked.pop("keep", None)
    formats = [asked[name] for name in ("weight", "activation") if name in asked]
    if keep is not None:
        return _keep(layer, keep, formats)
    values: dict[str, Any] = {name: rule.value for name, rule in asked.items()}
    return LinearPrecision(**{"backend": "auto", **values}) if formats else None


def _keep(layer: str, keep: Rule, formats: list[Rule]) -> LinearPrecision | None:
    """What a kept layer computes in, given the rules that would quantize its operands."""
    names = {str(rule.value) for rule in formats}
    if names == {"fp16"} or (formats and keep.value == "fp32"):
        raise UserError(
            f"{keep.by} keeps {layer} in {keep.value}, and {formats[0].by} asks for "
            f"{' and '.join(sorted(names))}; remove one of them"
        )
    if keep.value == "fp32":
        return FP32
    return BF16 if formats else None


def _check_experts(row: Row, model: nn.Module) -> None:
    reason = why_not(model.get_submodule(row.layer.rpartition(".")[0]))
    if reason:
        message = "give the callbacks a `where` without the experts"
        raise UserError(f"{row.layer} cannot be quantized: {reason}; {message}")


def _tied_names(model: nn.Module) -> frozenset[str]:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))
    return frozenset(name for name, module in linears if id(module.weight) in embeddings)
