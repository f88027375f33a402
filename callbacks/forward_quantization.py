"""Low-precision forward GEMM: weights and activations are quantized as they enter it.

One line of a recipe says the format; weight and activation can differ from it in any option, as in
the 4-bitter recipe, whose weights have one FP32 scale a tensor and whose activations one a token:

    forward_quantization: {format: nvfp4, outer_scale: row, weight: {outer_scale: tensor}}

`backend` says what computes the layers' GEMMs: emulation anywhere, the chip's own units through
torchao or Transformer Engine, or "auto": the units where the chip has them and they agree.
"""

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import override

from callbacks.base import PrecisionCallback
from lightning_qrl.formats import Format, get_format
from lightning_qrl.precision import PrecisionPlan
from lightning_qrl.precision.backends import check_name

Options = Mapping[str, Any]


class ForwardQuantization(PrecisionCallback):
    """Quantizes both operands of the forward GEMM.

    Args:
        format: name of a number format.
        where: a selector of layers, or several.
        side: where it holds: in training, in sampling, or both.
        weight: options in which the weight's format differs; ``format`` names another one;
            ``"none"`` leaves the weight as it is.
        activation: the same for the activation.
        backend: auto, emulate, torchao or transformer_engine.
        options: the format's options.

    Raises:
        ValueError: there is no such format, option, side or backend.
    """

    def __init__(
        self,
        format: str,
        *,
        where: str | list[str] = "linears",
        side: Literal["train", "rollout", "both"] = "both",
        weight: dict[str, Any] | Literal["none"] | None = None,
        activation: dict[str, Any] | Literal["none"] | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        self.where = [where] if isinstance(where, str) else where
        if not self.where:
            raise ValueError("where selects nothing; leave the callback out instead")
        if side not in ("train", "rollout", "both"):
            raise ValueError(f"side must be train, rollout or both, got {side!r}")
        check_name(backend)
        self.side = side
        self.backend = backend
        self.weight = _format(format, options, weight or {})
        self.activation = _format(format, options, activation or {})
        if self.weight is None and self.activation is None:
            raise ValueError("weight and activation are both none; leave the callback out instead")

    @override
    def declare(self, plan: PrecisionPlan) -> None:
        for where in self.where:
            plan.quantize(
                where,
                by=self.handle,
                side=self.side,
                weight=self.weight,
                activation=self.activation,
                backend=self.backend,
            )


def _format(name: str, options: Options, changes: Options | str) -> Format | None:
    """The common format with some changes; another format starts from its own defaults."""
    if isinstance(changes, str):
        return None
    own = str(changes.get("format", name))
    named = {key: value for key, value in changes.items() if key != "format"}
    common = options if own == name else {}
    return get_format(own, **{**common, **named})
