"""The precision plan: callbacks declare rules, the module commits them once to the model.

Rules are kept as a set and resolved only when the model is there, so the order in which callbacks
declare does not matter:

* `quantize` sets fields of the layers that a selector means. Two callbacks that ask different
  values of one field of one layer are an error that names both.
* `keep` wins over every `quantize`: the layer computes in BF16. Where nothing is quantized, there
  is nothing to keep.
* A layer that no rule quantizes stays the plain `nn.Linear` that it was.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import nn

from lightning_qrl.errors import UserError
from lightning_qrl.formats import Format, get_format
from lightning_qrl.precision.linear import LinearPrecision, QuantLinear, Side, SideSwitch
from lightning_qrl.precision.select import Selector, find_linears, select

Field = Format | str
SIDES: tuple[Side, ...] = get_args(Side)
_BF16 = get_format("bf16")
BF16 = LinearPrecision(_BF16, _BF16, _BF16, backward="quantized")
COMMITTED = "the plan is committed: rules come before the model"


@dataclass(frozen=True, slots=True)
class _Rule:
    where: Selector
    by: str
    sides: tuple[Side, ...]
    field: str  # a field of LinearPrecision, or "keep"
    value: Field


@dataclass(frozen=True, slots=True)
class Row:
    """What one linear layer computes in.

    Attributes:
        layer: full module name.
        shape: (O, I).
        train: precision while training; None is the plain layer in the trainer's precision.
        rollout: precision while sampling.
        kept_by: callbacks that keep the layer in BF16, sorted.
        weight_decay: whether the optimizer's weight decay applies.
        note: anything else worth knowing, such as a tied weight.
    """

    layer: str
    shape: tuple[int, int]
    train: LinearPrecision | None
    rollout: LinearPrecision | None
    kept_by: tuple[str, ...]
    weight_decay: bool
    note: str = ""

    @property
    def quantized(self) -> bool:
        """Whether an operand of its forward GEMM has fewer than 16 bits, on either side."""
        return any(p is not None and p.quantized for p in (self.train, self.rollout))


@runtime_checkable
class Declares(Protocol):
    """Anything that adds rules to a plan: the precision callbacks."""

    def declare(self, plan: "PrecisionPlan") -> None:
        """Add rules; no layer exists yet."""


class PrecisionPlan:
    """Which linear layer computes in what, and who asked for it."""

    def __init__(self) -> None:
        self._rules: set[_Rule] = set()
        self._no_decay = False
        self._rows: tuple[Row, ...] | None = None
        self._switch = SideSwitch()

    def quantize(
        self,
        where: Selector,
        *,
        by: str,
        side: Literal["train", "rollout", "both"] = "both",
        **values: Field | None,
    ) -> None:
        """Set fields of `LinearPrecision` on the selected layers.

        Args:
            where: the layers.
            by: the callback that asks, for messages and the table.
            side: where it holds.
            values: fields of `LinearPrecision`; None sets nothing.
        """
        known = {field.name for field in fields(LinearPrecision)}
        assert values.keys() <= known, f"not fields of LinearPrecision: {values.keys() - known}"
        assert side in (*SIDES, "both"), f"no such side: {side}"
        sides = SIDES if side == "both" else (side,)
        self._declare(
            _Rule(where, by, sides, name, v) for name, v in values.items() if v is not None
        )

    def keep(self, where: Selector, *, by: str) -> None:
        """Keep the selected layers in BF16, whatever else is asked of them."""
        self._declare([_Rule(where, by, SIDES, "keep", "bf16")])

    def no_decay_on_quantized(self) -> None:
        """Exempt the weights of quantized layers from weight decay."""
        assert self._rows is None or self._no_decay, COMMITTED
        self._no_decay = True

    def _declare(self, rules: Iterator[_Rule] | list[_Rule]) -> None:
        new = set(rules) - self._rules
        assert self._rows is None or not new, COMMITTED
        self._rules |= new

    def commit(self, model: nn.Module) -> None:
        """Resolve the rules and swap the layers they mean, once; later calls do nothing.

        Parameters stay the same objects under the same names, so optimizers and checkpoints do not
        depend on the plan.

        Raises:
            UserError: a selector matches nothing, or two callbacks disagree.
            ValueError: rules are asked of a model without linear decoder layers.
        """
        if self._rows is not None:
            return
        self._rows = self._resolve(model)
        for row in self._rows:
            if row.train is None and row.rollout is None:
                continue
            parent, _, name = row.layer.rpartition(".")
            linear = model.get_submodule(row.layer)
            assert isinstance(linear, nn.Linear)
            layer = QuantLinear.from_linear(linear, row.train, row.rollout, self._switch)
            setattr(model.get_submodule(parent), name, layer)

    def table(self) -> tuple[Row, ...]:
        """One row a linear layer, in the model's order."""
        assert self._rows is not None, "the plan is not committed yet"
        return self._rows

    def summary(self) -> str:
        """One line, such as "nvfp4 forward on 42 of 57 linears, 7 kept by bf16_tail"."""
        rows = self.table()
        used = {
            p for row in rows for p in (row.train, row.rollout) if p is not None and p.quantized
        }
        names = {f.name for p in used for f in (p.weight, p.activation) if f is not None}
        kept = Counter(" and ".join(row.kept_by) for row in rows if row.kept_by)
        if not names:
            return f"none of {len(rows)} linears below 16 bits"
        count, forward = self.count_quantized(), "/".join(sorted(names))
        parts = [f"{forward} forward on {count} of {len(rows)} linears"]
        return ", ".join(parts + [f"{count} kept by {by}" for by, count in sorted(kept.items())])

    def count_quantized(self) -> int:
        """Layers with a quantized operand on either side."""
        return sum(row.quantized for row in self.table())

    def count_kept(self) -> int:
        """Layers that stay in 16 bits or more."""
        return len(self.table()) - self.count_quantized()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Compute with the rollout side's precision; the weights must stand still meanwhile."""
        assert self._switch.current == "train", "sampling within sampling"
        self._switch.current = "rollout"
        try:
            yield
        finally:
            self._switch.current = "train"
            self._switch.weights.clear()

    def _resolve(self, model: nn.Module) -> tuple[Row, ...]:
        rules = sorted(self._rules, key=lambda r: (r.by, r.field, str(r.where), str(r.value)))
        meant = _select(rules, model)
        tied = _tied_names(model)
        return tuple(
            self._row(name, module, [r for r in rules if name in meant[r.where]], name in tied)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        )

    def _row(self, name: str, linear: nn.Linear, rules: list[_Rule], tied: bool) -> Row:
        keepers = tuple(dict.fromkeys(r.by for r in rules if r.field == "keep"))
        train, rollout = (_merge(name, rules, side, bool(keepers)) for side in SIDES)
        row = Row(
            layer=name,
            shape=(linear.out_features, linear.in_features),
            train=train,
            rollout=rollout,
            kept_by=() if train is None and rollout is None else keepers,
            weight_decay=True,
            note="weight tied to the embedding" if tied else "",
        )
        return replace(row, weight_decay=not (self._no_decay and row.quantized))


def _select(rules: list[_Rule], model: nn.Module) -> dict[Selector, frozenset[str]]:
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


def _merge(layer: str, rules: list[_Rule], side: Side, kept: bool) -> LinearPrecision | None:
    """The fields that the rules set on one side of one layer; None when it is not quantized."""
    asked: dict[str, _Rule] = {}
    for rule in rules:
        if side not in rule.sides or rule.field == "keep":
            continue
        first = asked.setdefault(rule.field, rule)
        if first.value != rule.value:
            raise UserError(
                f"{first.by} and {rule.by} disagree on the {rule.field} of {layer} "
                f"({side} side): {first.value} or {rule.value}; remove one of them"
            )
    if not asked.keys() & {"weight", "activation"}:
        return None
    values: dict[str, Any] = {name: rule.value for name, rule in asked.items()}
    return BF16 if kept else LinearPrecision(**values)


def _tied_names(model: nn.Module) -> frozenset[str]:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))
    return frozenset(name for name, module in linears if id(module.weight) in embeddings)
