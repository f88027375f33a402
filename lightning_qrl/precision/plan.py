"""The precision plan: callbacks declare rules, the module commits them once to the model.

Rules are kept as a set and resolved only when the model is there, so the order in which callbacks
declare does not matter:

* `quantize` sets fields of the layers that a selector means. Two callbacks that ask different
  values of one field of one layer are an error that names both.
* `keep` wins over every `quantize`: the layer computes in BF16. Where nothing is quantized, there
  is nothing to keep. A layer that is to compute in FP16 cannot be kept in BF16: neither is finer.
* `keep` in FP32 holds of every layer that it selects, and against the trainer's autocast too;
  together with a rule that quantizes the layer, it is an error.
* A layer that no rule quantizes stays what it was.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Literal, Protocol, runtime_checkable

from torch import nn

from lightning_qrl.precision.backends import Chip, find_chip, layer_class
from lightning_qrl.precision.experts import Sides, quantize_experts
from lightning_qrl.precision.linear import LinearPrecision
from lightning_qrl.precision.resolve import Field, Row, Rule, resolve
from lightning_qrl.precision.select import Selector
from lightning_qrl.precision.sides import SIDES, SideSwitch

COMMITTED = "the plan is committed: rules come before the model"


@runtime_checkable
class Declares(Protocol):
    """Anything that adds rules to a plan: the precision callbacks."""

    def declare(self, plan: "PrecisionPlan") -> None:
        """Add rules; no layer exists yet."""


class PrecisionPlan:
    """Which linear layer computes in what, and who asked for it."""

    def __init__(self) -> None:
        self._rules: set[Rule] = set()
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
            Rule(where, by, sides, name, v) for name, v in values.items() if v is not None
        )

    def keep(self, where: Selector, *, by: str, at: Literal["bf16", "fp32"] = "bf16") -> None:
        """Keep the selected layers in 16 bits or more, on both sides.

        Args:
            where: the layers.
            by: the callback that asks, for messages and the table.
            at: what they compute in.
        """
        self._declare([Rule(where, by, SIDES, "keep", at)])

    def no_decay_on_quantized(self) -> None:
        """Exempt the weights of quantized layers from weight decay."""
        assert self._rows is None or self._no_decay, COMMITTED
        self._no_decay = True

    def _declare(self, rules: Iterator[Rule] | list[Rule]) -> None:
        new = set(rules) - self._rules
        assert self._rows is None or not new, COMMITTED
        self._rules |= new

    def commit(self, model: nn.Module, chip: Chip | None = None) -> None:
        """Resolve the rules and swap the layers they mean, once; later calls do nothing.

        Parameters stay the same objects under the same names, so optimizers and checkpoints do not
        depend on the plan.

        Args:
            model: the policy, on any device.
            chip: what it will compute on; decides the backends. None takes the machine's.

        Raises:
            UserError: a selector matches nothing, two callbacks disagree, or a layer or a backend
                cannot do what is asked of it.
            ValueError: rules are asked of a model without linear decoder layers.
        """
        if self._rows is not None:
            return
        self._rows = resolve(self._rules, model, chip or find_chip(), no_decay=self._no_decay)
        asked = [r for r in self._rows if r.train is not None or r.rollout is not None]
        _swap_linears(model, [row for row in asked if not row.fused], self._switch)
        _quantize_experts(model, [row for row in asked if row.fused], self._switch)

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
        forward = f"{'/'.join(sorted(names))} forward on {self.count_quantized()}"
        parts = [f"{forward} of {len(rows)} linears"]
        if not names:
            parts = [f"none of {len(rows)} linears below 16 bits"]
        return ", ".join(parts + [f"{count} kept by {by}" for by, count in sorted(kept.items())])

    def count_quantized(self) -> int:
        """Layers with a quantized operand on either side."""
        return sum(row.quantized for row in self.table())

    def count_kept(self) -> int:
        """Layers that stay in 16 bits or more."""
        return len(self.table()) - self.count_quantized()

    def reseed(self, seed: int) -> None:
        """Begin the noise of stochastic rounding anew."""
        self._switch.reseed(seed)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Compute with the rollout side's precision; the weights must stand still meanwhile."""
        assert self._switch.current == "train", "sampling within sampling"
        self._switch.current = "rollout"
        try:
            with self.holding():
                yield
        finally:
            self._switch.current = "train"

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Quantize each weight once; the weights must stand still meanwhile."""
        assert not self._switch.holds, "holding within holding"
        self._switch.holds = True
        try:
            yield
        finally:
            self._switch.holds = False
            self._switch.weights.clear()


def _swap_linears(model: nn.Module, rows: list[Row], switch: SideSwitch) -> None:
    for row in rows:
        parent, _, name = row.layer.rpartition(".")
        linear = model.get_submodule(row.layer)
        assert isinstance(linear, nn.Linear)
        kind = layer_class(row.train, row.rollout)
        layer = kind.from_linear(linear, row.train, row.rollout, switch)
        setattr(model.get_submodule(parent), name, layer)


def _quantize_experts(model: nn.Module, rows: list[Row], switch: SideSwitch) -> None:
    by_module: dict[str, dict[str, Sides]] = defaultdict(dict)
    for row in rows:
        module, _, weight = row.layer.rpartition(".")
        by_module[module][weight] = {"train": row.train, "rollout": row.rollout}
    for module, weights in by_module.items():
        quantize_experts(model.get_submodule(module), weights, switch)
