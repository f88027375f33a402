"""Backends: what computes the GEMMs of a quantized layer, and the choice among them.

    emulate              anywhere; exact in BF16
    torchao              torch's scaled multiply: FP8 on Ada, Hopper and CPUs; more on Blackwell
    transformer_engine   Transformer Engine's layers
    auto                 the first of the native two that the chip has units for, and that agrees
                         with the emulation on a small layer; else emulate

One backend is one module here, found by its name. To add one, write the module: a class of the
module's name that is a `Backend`. `auto` tries all but the emulation, in the order of their names.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_qrl.plugins import load_plugin, nearest, plugin_names
from lightning_qrl.precision.backends._agreement import disagreement
from lightning_qrl.precision.backends.base import Backend, Chip, Shape, find_chip
from lightning_qrl.precision.full import FP32Linear
from lightning_qrl.precision.linear import LinearPrecision, QuantLinear

__all__ = [
    "Backend",
    "Chip",
    "Choice",
    "backend_names",
    "check_name",
    "choose",
    "find_chip",
    "layer_class",
    "settle",
]

EMULATE = "emulate"
FUSED = "fused experts are emulated"
BF16_ONLY = "it multiplies 16-bit operands in BF16, whose 8 significant bits hold no FP16 value"


@dataclass(frozen=True, slots=True)
class Choice:
    """What computes a layer.

    Attributes:
        backend: its name, never "auto".
        why: in a few words.
    """

    backend: str
    why: str


def backend_names() -> list[str]:
    """What a recipe can ask for."""
    return ["auto", *plugin_names(__name__)]


def check_name(name: str) -> None:
    """Refuse a name that is no backend's.

    Raises:
        ValueError: there is no such backend; names the nearest.
    """
    if name not in backend_names():
        raise ValueError(f"no backend {name!r}; {nearest(name, backend_names())}")


@functools.cache
def load(name: str) -> Backend:
    """A backend by its name."""
    backend: Backend = load_plugin(__name__, name)()
    return backend


def choose(asked: str, precision: LinearPrecision, shape: Shape, chip: Chip) -> Choice:
    """What computes a layer.

    Args:
        asked: name of a backend, or "auto".
        precision: what the layer computes in.
        shape: of its weight.
        chip: what the run computes on.

    Raises:
        ValueError: the backend that was asked for cannot do it; says why.
    """
    if len(shape) > 2 and asked not in ("auto", EMULATE):
        raise ValueError(FUSED)
    if asked != "auto":
        obstacle = load(asked).obstacle(precision, shape, chip)
        if obstacle:
            raise ValueError(obstacle)
        return Choice(asked, "as asked")
    first_reason = FUSED if len(shape) > 2 else ""
    for name in plugin_names(__name__):
        if name == EMULATE or len(shape) > 2:
            continue
        reason = _unfit(load(name), precision, shape, chip)
        if reason is None:
            return Choice(name, f"{chip.name} has the units, and it agrees with the emulation")
        first_reason = first_reason or reason
    return Choice(EMULATE, first_reason)


def _unfit(backend: Backend, precision: LinearPrecision, shape: Shape, chip: Chip) -> str | None:
    """Why "auto" passes a backend over; None if it does not."""
    return (
        backend.obstacle(precision, shape, chip)
        or backend.idle(precision, chip)
        or _disagreement(backend.name, precision)
    )


@functools.cache
def _disagreement(name: str, precision: LinearPrecision) -> str | None:
    """The agreement test, run once a process."""
    return disagreement(load(name), precision, "cuda")


def settle(
    sides: Sequence[LinearPrecision | None], shape: Shape, chip: Chip
) -> tuple[list[LinearPrecision | None], str]:
    """Choose the backends of a layer: its precisions with a backend each, and why.

    Args:
        sides: what the layer computes in, training and sampling; `backend` is what was asked for.
        shape: of its weight.
        chip: what the run computes on.

    Raises:
        ValueError: a backend cannot do what is asked of it; says what to do.
    """
    settled: list[LinearPrecision | None] = []
    reasons = []
    for precision in sides:
        if precision is None or not precision.quantized:
            _check_16_bits(precision)
            settled.append(precision and replace(precision, backend=EMULATE))
            continue
        try:
            choice = choose(precision.backend, precision, shape, chip)
        except ValueError as error:
            message = f"backend {precision.backend} cannot compute it: {error}"
            raise ValueError(f"{message}; set backend to auto or emulate") from None
        settled.append(replace(precision, backend=choice.backend))
        reasons.append(choice.why)
    native = _native(settled)
    if len(native) > 1:
        raise ValueError(
            f"it cannot change between backends {' and '.join(sorted(native))} from training to "
            "sampling; give both sides one backend, or emulate one of them"
        )
    return settled, "; ".join(dict.fromkeys(reasons))


def _check_16_bits(precision: LinearPrecision | None) -> None:
    """Nothing but the emulation computes in FP16."""
    if precision is None or precision.backend in ("auto", EMULATE):
        return
    if any(format is not None and format.wide for format in precision.operands):
        raise ValueError(
            f"backend {precision.backend} cannot compute it: {BF16_ONLY}; "
            "set backend to auto or emulate"
        )


def layer_class(*sides: LinearPrecision | None) -> type[QuantLinear]:
    """The class of a layer that computes in these settled precisions."""
    if any(precision is not None and precision.fp32 for precision in sides):
        return FP32Linear
    native = _native(sides)
    return load(native.pop()).layer() if native else QuantLinear


def _native(sides: Sequence[LinearPrecision | None]) -> set[str]:
    return {precision.backend for precision in sides if precision is not None} - {EMULATE}
