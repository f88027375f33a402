"""A linear layer whose three GEMMs run in low precision.

    forward  Y  = Q(X) Q(W)^T
    dgrad    dX = dY W'         wgrad    dW = dY^T X'

`LinearPrecision.backward` says what W' and X' are, and whether dY is quantized:

    high_precision   W' = W,          X' = X            the original operands
    dequantized      W' = DQ(Q(W)),   X' = DQ(Q(X))     the very values that the forward used
    quantized        Q(dY) Q_col(W),  Q(dY)^T Q_col(X)  re-quantized along the axis that is summed

Gradients pass the rounding unchanged (straight-through); all else is differentiated as it is
computed. (Transformer Engine's `backward_override`; "The 4-bitter Lesson", dequantized backward.)
In the quantized backward a Hadamard rotation of the gradient's format is that of the wgrad GEMM,
for both of its operands; dgrad has none (NVIDIA's NVFP4 pretraining, arXiv 2509.25149).

What the backward needs is kept as codes and scales, so that an activation takes the bytes of its
format until then. `gemm.py` says how operands are multiplied.

N tokens, I in features, O out features.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_qrl.formats import Format, Operand, Quantized
from lightning_qrl.precision.gemm import (
    Plain,
    common_rotation,
    emulate,
    gemm_dtype,
    output_dtype,
    quantize,
    rotated,
    times_outer,
)
from lightning_qrl.precision.sides import Side, SideSwitch

Backward = Literal["quantized", "high_precision", "dequantized"]
Multiply = Callable[[Operand, Operand, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class LinearPrecision:
    """What one linear layer computes in.

    Attributes:
        weight: format of the weight in the forward GEMM; None leaves it as it is.
        activation: format of the input in the forward GEMM; None leaves it as it is.
        gradient: format of the incoming gradient; used by the quantized backward alone.
        backward: which operands the two backward GEMMs take (see the module's text).
        backend: name of what computes the GEMMs (see `backends`).
        fp32: operands and output are FP32, also under autocast (see `full`); without formats.
    """

    weight: Format | None = None
    activation: Format | None = None
    gradient: Format | None = None
    backward: Backward = "high_precision"
    backend: str = "emulate"
    fp32: bool = False

    @property
    def quantized(self) -> bool:
        """Whether an operand of the forward GEMM has fewer than 16 bits."""
        return any(f is not None and f.bits < 16 for f in (self.weight, self.activation))

    @property
    def operands(self) -> tuple[Format | None, ...]:
        """The formats of all that its GEMMs multiply."""
        gradient = self.gradient if self.backward == "quantized" else None
        return self.weight, self.activation, gradient

    @property
    def requantizes(self) -> bool:
        """Whether the backward rounds along another axis than the forward did."""
        turned = any(f is not None and not f.elementwise for f in self.operands)
        return self.backward == "quantized" and turned


class QuantLinear(nn.Linear):
    """`nn.Linear` with the same parameters and state-dict keys, computing as its precision says.

    Attributes:
        precision: of each side; None computes as `nn.Linear`.
        switch: tells which side holds.
    """

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
        dtype = output_dtype(input)
        x_NI = input.to(gemm_dtype(input, *precision.operands)).reshape(-1, self.in_features)
        with torch.autocast(input.device.type, enabled=False):
            y_NO = quantized_linear(
                x_NI,
                self.weight,
                precision,
                self.switch,
                key=self,
                multiply=self.multiplier(precision),
            )
            if self.bias is not None:
                y_NO = y_NO + self.bias.to(y_NO.dtype)
        return y_NO.to(dtype).view(*input.shape[:-1], self.out_features)

    def multiplier(self, precision: LinearPrecision) -> Multiply:
        """How two operands are multiplied; a backend has its own."""
        return emulate

    @override
    def extra_repr(self) -> str:
        sides = dict.fromkeys(self.precision.values())
        return f"{super().extra_repr()}, precision={' | '.join(map(str, sides))}"


def quantized_linear(
    x_NI: Tensor,
    weight_OI: Tensor,
    precision: LinearPrecision,
    switch: SideSwitch,
    *,
    key: Hashable,
    multiply: Multiply = emulate,
) -> Tensor:
    """X W^T in low precision, differentiable in both.

    Args:
        x_NI: FP32 or BF16, the dtype that the GEMMs run in.
        weight_OI: a parameter, or a part of one, in any floating-point dtype.
        precision: what it computes in.
        switch: the model's.
        key: names the weight; its quantized self is kept under it while the weights stand still.
        multiply: how two operands are multiplied.

    Returns:
        [N, O] in x's dtype.
    """
    with torch.no_grad():
        w = _weight_operand(weight_OI, precision.weight, switch, key)
    if not torch.is_grad_enabled():  # or operands are packed for a backward that never comes
        x_NI, weight_OI = x_NI.detach(), weight_OI.detach()
    y_NO: Tensor = _Linear.apply(x_NI, weight_OI, w, precision, switch, multiply)  # type: ignore[no-untyped-call]
    return y_NO


def _weight_operand(
    weight_OI: Tensor, format: Format | None, switch: SideSwitch, key: Hashable
) -> Operand:
    """The weight, quantized anew, or once as long as the weights stand still."""
    if not switch.holds:
        return quantize(format, weight_OI, switch.generator(weight_OI))
    if key not in switch.weights:
        switch.weights[key] = quantize(format, weight_OI, switch.generator(weight_OI))
    return switch.weights[key]


class _Linear(torch.autograd.Function):
    """Forward, dgrad and wgrad of one layer; the equations stand in the module's text."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        w: Operand,
        precision: LinearPrecision,
        switch: SideSwitch,
        multiply: Multiply,
    ) -> Tensor:
        generator = switch.generator(x_NI)
        x = quantize(precision.activation, x_NI, generator)
        ctx.precision, ctx.generator, ctx.multiply = precision, generator, multiply
        needs_x, needs_w = ctx.needs_input_grad[:2]  # dgrad takes W, wgrad takes X
        _save(
            ctx,
            _for_wgrad(x, x_NI, precision, generator) if needs_w else None,
            _for_dgrad(w, weight_OI, precision) if needs_x else None,
        )
        return multiply(x, w, x_NI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy_NO,) = grads
        x, w = _saved(ctx)
        rule = ctx.precision
        with torch.autocast(dy_NO.device.type, enabled=False):
            if rule.backward == "quantized" and not rule.requantizes:
                dy = quantize(rule.gradient, dy_NO, ctx.generator)
                dy_NO = dy.scaled().values.to(dy_NO.dtype)
                w = w and quantize(rule.weight, w.scaled().values, ctx.generator)
            dx_NI = None if w is None else _dgrad(ctx, dy_NO, w)
            dw_OI = None if x is None else _wgrad(ctx, dy_NO, x)  # autograd casts it to W's dtype
        return dx_NI, dw_OI, None, None, None, None


def _for_wgrad(
    x: Operand, x_NI: Tensor, rule: LinearPrecision, generator: torch.Generator
) -> Operand:
    """X as wgrad wants it; in the quantized backward transposed, quantized along its tokens."""
    if rule.backward == "high_precision":
        return Plain(x_NI)
    if not rule.requantizes:
        return x
    rotation = common_rotation(rule.gradient, rule.activation)
    return quantize(rotated(rule.activation, rotation), x_NI.detach().T, generator)


def _for_dgrad(w: Operand, weight_OI: Tensor, rule: LinearPrecision) -> Operand:
    """W as dgrad wants it; the quantized backward starts from the parameter, which is there."""
    return w if rule.backward == "dequantized" else Plain(weight_OI)


def _dgrad(ctx: Any, dy_NO: Tensor, w: Operand) -> Tensor:
    rule, dtype = ctx.precision, dy_NO.dtype
    if rule.requantizes:
        dy = quantize(rotated(rule.gradient, "none"), dy_NO, ctx.generator)
        w_IO = quantize(rotated(rule.weight, "none"), w.scaled().values.T, ctx.generator)
        product: Tensor = ctx.multiply(dy, w_IO, dtype)
        return product
    w_OI = w.scaled().unrotated()
    return times_outer(dy_NO, columns=w_OI.outer) @ w_OI.values.to(dtype)


def _wgrad(ctx: Any, dy_NO: Tensor, x: Operand) -> Tensor:
    rule, dtype = ctx.precision, dy_NO.dtype
    if rule.requantizes:
        rotation = common_rotation(rule.gradient, rule.activation)
        dy_ON = quantize(rotated(rule.gradient, rotation), dy_NO.T, ctx.generator)
        product: Tensor = ctx.multiply(dy_ON, x, dtype)
        return product
    x_NI = x.scaled().unrotated()
    return times_outer(dy_NO, rows=x_NI.outer).T @ x_NI.values.to(dtype)


def _save(ctx: Any, *operands: Operand | None) -> None:
    """Keep operands for the backward: codes and scales, or the matrix of a plain one."""
    kept = [_parts(operand) for operand in operands]
    ctx.meanings = [meaning for _, meaning in kept]
    ctx.save_for_backward(*(tensor for tensors, _ in kept for tensor in tensors))


def _parts(operand: Operand | None) -> tuple[tuple[Tensor | None, ...], Any]:
    """Three tensors of an operand, and what they mean."""
    if operand is None:
        return (None, None, None), None
    if isinstance(operand, Plain):
        return (operand.matrix, None, None), Plain
    q = operand.quantized()
    return (q.packed, q.scale_codes, q.outer_scale), (q.layout, q.shape)


def _saved(ctx: Any) -> list[Operand | None]:
    """What `_save` kept."""
    tensors = ctx.saved_tensors
    return [_whole(tensors[3 * i : 3 * i + 3], meaning) for i, meaning in enumerate(ctx.meanings)]


def _whole(tensors: Any, meaning: Any) -> Operand | None:
    """Undo `_parts`."""
    if meaning is None:
        return None
    return Plain(tensors[0]) if meaning is Plain else Quantized(*tensors, *meaning)
