"""A linear layer whose three GEMMs run in low precision.

    forward  Y  = Q(X) Q(W)^T
    dgrad    dX = dY W'         wgrad    dW = dY^T X'

`LinearPrecision.backward` says what W' and X' are, and whether dY is quantized:

    high_precision   W' = W,          X' = X            the original operands
    dequantized      W' = DQ(Q(W)),   X' = DQ(Q(X))     the very values that the forward used
    quantized        Q(dY) Q_col(W),  Q(dY)^T Q_col(X)  re-quantized along the axis that is summed

Gradients pass the rounding unchanged (straight-through); all else is differentiated as it is
computed. (Transformer Engine's `backward_override`; "The 4-bitter Lesson", dequantized backward.)

A quantized value is element code x block scale x outer scale. The first product has so few
significant bits that BF16 holds it exactly; the outer scale, one FP32 number for a tensor or a row,
is applied to the GEMM's result. A GEMM on such values with FP32 accumulation is what the hardware
computes. The GEMM runs in the dtype of its input (the autocast dtype under autocast).

N tokens, I in features, O out features.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_qrl.formats import Format, Scaled

Backward = Literal["quantized", "high_precision", "dequantized"]
Side = Literal["train", "rollout"]


@dataclass(frozen=True, slots=True)
class LinearPrecision:
    """What one linear layer computes in.

    Attributes:
        weight: format of the weight in the forward GEMM; None leaves it as it is.
        activation: format of the input in the forward GEMM; None leaves it as it is.
        gradient: format of the incoming gradient; used by the quantized backward alone.
        backward: which operands the two backward GEMMs take (see the module's text).
    """

    weight: Format | None = None
    activation: Format | None = None
    gradient: Format | None = None
    backward: Backward = "high_precision"

    @property
    def quantized(self) -> bool:
        """Whether an operand of the forward GEMM has fewer than 16 bits."""
        return any(f is not None and f.bits < 16 for f in (self.weight, self.activation))


@dataclass(slots=True)
class SideSwitch:
    """Which side's precision the layers of one model use now; shared by all of them.

    While the sampler runs, the weights stand still, so each is quantized once: `weights` keeps the
    quantized weight of every layer until the sampler is done.
    """

    current: Side = "train"
    weights: dict[int, Scaled] = field(default_factory=dict)


class QuantLinear(nn.Linear):
    """`nn.Linear` with the same parameters and state-dict keys, computing as its precision says."""

    precision: dict[Side, LinearPrecision | None]
    switch: SideSwitch

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        train: LinearPrecision | None,
        rollout: LinearPrecision | None,
        switch: SideSwitch,
    ) -> Self:
        """The same layer in low precision; it takes over the very Parameter objects.

        Args:
            linear: the layer to stand in for.
            train: precision while training; None computes as `nn.Linear`.
            rollout: precision while sampling; None computes as `nn.Linear`.
            switch: tells which of the two holds.
        """
        bias = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, bias=bias, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.precision = {"train": train, "rollout": rollout}
        layer.switch = switch
        layer.training = linear.training
        return layer

    @override
    def forward(self, input: Tensor) -> Tensor:
        """[..., I] to [..., O], in the dtype that `nn.Linear` would return."""
        precision = self.precision[self.switch.current]
        if precision is None:
            return super().forward(input)
        dtype = _compute_dtype(input)
        x_NI = input.to(dtype).reshape(-1, self.in_features)
        with torch.autocast(input.device.type, enabled=False):
            w_OI = self._weight(precision)
            y_NO: Tensor = _Linear.apply(x_NI, self.weight, w_OI, precision)  # type: ignore[no-untyped-call]
            if self.bias is not None:
                y_NO = y_NO + self.bias.to(dtype)
        return y_NO.view(*input.shape[:-1], self.out_features)

    def _weight(self, precision: LinearPrecision) -> Scaled:
        if self.switch.current == "train":
            return _scaled(precision.weight, self.weight)
        kept = self.switch.weights
        if id(self) not in kept:
            kept[id(self)] = _scaled(precision.weight, self.weight)
        return kept[id(self)]

    @override
    def extra_repr(self) -> str:
        sides = dict.fromkeys(self.precision.values())
        return f"{super().extra_repr()}, precision={' | '.join(map(str, sides))}"


class _Linear(torch.autograd.Function):
    """Forward, dgrad and wgrad of one layer; the equations stand in the module's text."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, w: Scaled, precision: LinearPrecision
    ) -> Tensor:
        dtype = x_NI.dtype
        x = _scaled(precision.activation, x_NI)
        ctx.precision, ctx.weight_dtype = precision, weight_OI.dtype
        if precision.backward == "dequantized":
            saved = (x.values.to(dtype), x.outer, w.values.to(dtype), w.outer)
        else:
            saved = (x_NI, None, weight_OI.to(dtype), None)
        ctx.save_for_backward(*saved)
        return _gemm(x, w, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy_NO,) = grads
        dx_NI = dw_OI = None
        x_NI, x_outer, w_OI, w_outer = ctx.saved_tensors
        requantize = ctx.precision.backward == "quantized"
        if ctx.needs_input_grad[0]:
            dx_NI = (
                _dgrad_quantized(dy_NO, w_OI, ctx.precision)
                if requantize
                else _outer(dy_NO, w_outer, transpose=True) @ w_OI
            )
        if ctx.needs_input_grad[1]:
            dw_OI = (
                _wgrad_quantized(dy_NO, x_NI, ctx.precision)
                if requantize
                else _outer(dy_NO, x_outer).T @ x_NI
            ).to(ctx.weight_dtype)
        return dx_NI, dw_OI, None, None


def _dgrad_quantized(dy_NO: Tensor, w_OI: Tensor, rule: LinearPrecision) -> Tensor:
    return _gemm(_scaled(rule.gradient, dy_NO), _scaled(rule.weight, w_OI.T), dy_NO.dtype)


def _wgrad_quantized(dy_NO: Tensor, x_NI: Tensor, rule: LinearPrecision) -> Tensor:
    dy_ON, x_IN = _scaled(rule.gradient, dy_NO.T), _scaled(rule.activation, x_NI.T)
    return _gemm(dy_ON, x_IN, dy_NO.dtype)


def _gemm(a_MK: Scaled, b_NK: Scaled, dtype: torch.dtype) -> Tensor:
    """A B^T of two scaled operands: the GEMM on their values, then the outer scales."""
    product_MN = F.linear(a_MK.values.to(dtype), b_NK.values.to(dtype))
    return _outer(_outer(product_MN, a_MK.outer), b_NK.outer, transpose=True)


def _outer(values: Tensor, outer: Tensor | None, transpose: bool = False) -> Tensor:
    """Values times an outer scale (of the rows, or transposed of the columns), in FP32."""
    if outer is None:
        return values
    scale = outer.T if transpose and outer.ndim else outer
    return (values * scale).to(values.dtype)  # FP32 scale: the product is FP32


def _scaled(format: Format | None, values: Tensor) -> Scaled:
    return Scaled(values, None) if format is None else format.scaled(values)


def _compute_dtype(input: Tensor) -> torch.dtype:
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
