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
computes. The GEMM runs in the dtype of its input (the autocast dtype under autocast), save that
FP16 becomes FP32 inside of the layer: the largest product of two NVFP4 values is far above 65504.

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
    quantized weight of every layer (in each dtype that is asked for) until the sampler is done.
    """

    current: Side = "train"
    weights: dict[tuple[nn.Module, torch.dtype], Scaled] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model switches with the model: the plan that switches them is one."""
        return self


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
        output_dtype = _output_dtype(input)
        dtype = torch.float32 if output_dtype == torch.float16 else output_dtype
        x_NI = input.to(dtype).reshape(-1, self.in_features)
        with torch.autocast(input.device.type, enabled=False):
            w_OI = self._weight(precision, dtype)
            y_NO: Tensor = _Linear.apply(x_NI, self.weight, w_OI, precision)  # type: ignore[no-untyped-call]
            if self.bias is not None:
                y_NO = y_NO + self.bias.to(dtype)
        return y_NO.to(output_dtype).view(*input.shape[:-1], self.out_features)

    def _weight(self, precision: LinearPrecision, dtype: torch.dtype) -> Scaled:
        if self.switch.current == "train":
            return _scaled(precision.weight, self.weight, dtype)
        kept, key = self.switch.weights, (self, dtype)
        if key not in kept:
            kept[key] = _scaled(precision.weight, self.weight, dtype)
        return kept[key]

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
        x = _scaled(precision.activation, x_NI, x_NI.dtype)
        ctx.precision = precision
        if precision.backward == "dequantized":
            ctx.save_for_backward(x.values, x.outer, w.values, w.outer)
        else:
            ctx.save_for_backward(x_NI, None, weight_OI, None)
        return _gemm(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dy_NO,) = grads
        x_NI, x_outer, w_OI, w_outer = ctx.saved_tensors
        x, w = Scaled(x_NI, x_outer), Scaled(w_OI, w_outer)
        dx_NI = dw_OI = None
        with torch.autocast(dy_NO.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx_NI = _dgrad(dy_NO, w, ctx.precision)
            if ctx.needs_input_grad[1]:
                dw_OI = _wgrad(dy_NO, x, ctx.precision)  # autograd casts it to W's dtype
        return dx_NI, dw_OI, None, None


def _dgrad(dy_NO: Tensor, w: Scaled, rule: LinearPrecision) -> Tensor:
    dtype = dy_NO.dtype
    if rule.backward == "quantized":
        return _gemm(_scaled(rule.gradient, dy_NO, dtype), _scaled(rule.weight, w.values.T, dtype))
    return _outer(dy_NO, columns=w.outer) @ w.values.to(dtype)


def _wgrad(dy_NO: Tensor, x: Scaled, rule: LinearPrecision) -> Tensor:
    dtype = dy_NO.dtype
    if rule.backward == "quantized":
        dy_ON = _scaled(rule.gradient, dy_NO.T, dtype)
        return _gemm(dy_ON, _scaled(rule.activation, x.values.T, dtype))
    return _outer(dy_NO, rows=x.outer).T @ x.values


def _gemm(a_MK: Scaled, b_NK: Scaled) -> Tensor:
    """A B^T of two scaled operands: the GEMM on their values, then the outer scales."""
    product_MN = F.linear(a_MK.values, b_NK.values)
    return _outer(product_MN, rows=a_MK.outer, columns=b_NK.outer)


def _outer(values_MN: Tensor, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
    """Values times the outer scales of the rows and of the columns, rounded once, at the end."""
    scaled_MN = values_MN
    # A scale of two axes makes the product FP32; one of none would itself be rounded to BF16.
    if rows is not None:
        scaled_MN = scaled_MN * rows.reshape(-1, 1)
    if columns is not None:
        scaled_MN = scaled_MN * columns.reshape(1, -1)
    return scaled_MN.to(values_MN.dtype)


def _scaled(format: Format | None, values: Tensor, dtype: torch.dtype) -> Scaled:
    """Quantized values in the dtype of the GEMM: exact in BF16 already."""
    if format is None:
        return Scaled(values.to(dtype), None)
    scaled = format.scaled(values)
    return Scaled(scaled.values.to(dtype), scaled.outer)


def _output_dtype(input: Tensor) -> torch.dtype:
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
