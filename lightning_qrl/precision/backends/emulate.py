"""Emulation: the numbers of the format, multiplied on the units that the machine has; anywhere."""

from typing_extensions import override

from lightning_qrl.precision.backends.base import Backend, Chip, Shape
from lightning_qrl.precision.linear import LinearPrecision, QuantLinear


class Emulate(Backend):
    """Computes every precision on every chip, in the way of `QuantLinear`."""

    name = "emulate"

    @override
    def obstacle(self, precision: LinearPrecision, shape: Shape, chip: Chip) -> str | None:
        return None

    @override
    def idle(self, precision: LinearPrecision, chip: Chip) -> str | None:
        return "it is emulation"

    @override
    def layer(self) -> type[QuantLinear]:
        return QuantLinear
