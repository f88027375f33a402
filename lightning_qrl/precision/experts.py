"""Fused experts in low precision: each expert computes as a linear layer of its own would.

transformers keeps the routed experts of a decoder layer as 3-D parameters, `gate_up_proj`
[E, 2F, H] and `down_proj` [E, H, F], and looks up how to compute with them in a registry,
`ExpertsInterface`, by the name in the module's configuration. For the tokens X_e of expert e:

    h_e = act(gate) * up,  [gate; up] = Q(X_e) Q(W_e)^T         y_e = Q(h_e) Q(V_e)^T

and backward as `linear.py` says. Every expert's slice is quantized by itself and so has an outer
scale of its own; gate and up, one slice, share theirs. Where an activation has one outer scale a
"tensor", the tensor is what enters one GEMM: the tokens of one expert (as in Transformer Engine's
`GroupedLinear`).

Nothing is copied or renamed. A quantized module stays of its class with its very Parameter objects;
it gets a configuration of its own, which asks for one of two implementations of ours:

    eager     one expert after the other, results added up in the output
    grouped   tokens sorted by expert, so that each expert's are one slice; results summed a token

They stand in for the implementation that the model asked for: the first for `eager`, the second for
all others, which differ in speed alone. On a side without precision the model's own runs.

N tokens, K experts a token, S = N K, E experts, H hidden, F expert's width, I in, O out features.
"""

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lightning_qrl.precision.gemm import gemm_dtype, output_dtype
from lightning_qrl.precision.linear import LinearPrecision, quantized_linear
from lightning_qrl.precision.sides import Side, SideSwitch

Sides = Mapping[Side, LinearPrecision | None]
EAGER, GROUPED = "lightning_qrl_eager", "lightning_qrl_grouped"


@dataclass(frozen=True, slots=True)
class ExpertPrecision:
    """What one module of experts computes in; kept on the module.

    Attributes:
        sides: precision of each weight by its name, on each side; None computes plainly.
        switch: tells which side holds.
        asked: the implementation that the model asked for.
    """

    sides: Mapping[str, Sides]
    switch: SideSwitch
    asked: str | None

    def now(self, weight: str) -> LinearPrecision | None:
        """The precision of a weight on the side that holds."""
        return self.sides[weight][self.switch.current]


def expert_weights(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Names and shapes (E, O, I) of the weights of fused experts; empty for any other module.

    Of experts that transformers does not dispatch through its registry, all 3-D parameters: they
    cannot be quantized (see `why_not`), but must not be passed over in silence either.
    """
    own = dict(module.named_parameters(recurse=False))
    cubes = {name: tuple(p.shape) for name, p in own.items() if p.ndim == 3}
    if not _dispatched(module):
        return cubes if type(module).__name__.endswith("Experts") else {}  # type: ignore[return-value]
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    shapes = ((name, own[name].shape) for name in names)
    if module.is_transposed:
        return {name: (e, o, i) for name, (e, i, o) in shapes}
    return {name: (e, o, i) for name, (e, o, i) in shapes}


def why_not(module: nn.Module) -> str:
    """Why fused experts cannot be quantized; empty where they can."""
    if not _dispatched(module):
        return f"{type(module).__name__} does not go through transformers' ExpertsInterface"
    return "its experts are spread over devices" if module._is_expert_parallel else ""


def quantize_experts(
    module: nn.Module,
    sides: Mapping[str, Sides],
    switch: SideSwitch,
) -> None:
    """Let fused experts compute as their precision says.

    Args:
        module: the experts.
        sides: precision by weight and side; weights that are not named compute plainly.
        switch: tells which side holds.
    """
    experts: Any = module
    plain: Sides = {"train": None, "rollout": None}
    every = {name: dict(sides.get(name, plain)) for name in expert_weights(module)}
    asked = experts.config._experts_implementation
    experts.precision = ExpertPrecision(every, switch, asked)
    experts.config = copy.copy(experts.config)  # the model's own is shared by all its modules
    experts.config._experts_implementation = EAGER if asked == "eager" else GROUPED


def _dispatched(module: nn.Module) -> bool:
    """Whether the class has transformers' `use_experts_implementation`."""
    return hasattr(module, "_is_expert_parallel") and hasattr(type(module).forward, "__wrapped__")


def _eager(experts: Any, hidden_NH: Tensor, chosen_NK: Tensor, share_NK: Tensor) -> Tensor:
    """The counterpart of a model's own `eager`: a loop over the experts that got tokens."""
    if _plain(experts):
        return _as_asked(experts, hidden_NH, chosen_NK, share_NK)
    expert = _expert(experts)
    output_NH = torch.zeros_like(hidden_NH)
    # no token at all still passes an expert: the weights' gradients are zeros, never None
    for e in _counts(experts, chosen_NK).nonzero()[:, 0].tolist() or [0]:
        slot_S, token_S = torch.where(torch.eq(chosen_NK.T, e))
        y_SH = expert(e, hidden_NH[token_S]) * share_NK[token_S, slot_S, None]
        output_NH.index_add_(0, token_S, y_SH.to(output_NH.dtype))
    return output_NH


def _grouped(experts: Any, hidden_NH: Tensor, chosen_NK: Tensor, share_NK: Tensor) -> Tensor:
    """The counterpart of `grouped_mm`: tokens sorted by expert."""
    if _plain(experts):
        return _as_asked(experts, hidden_NH, chosen_NK, share_NK)
    expert = _expert(experts)
    order_S = chosen_NK.flatten().argsort(stable=True)
    x_SH = hidden_NH[order_S // chosen_NK.shape[1]]
    parts = enumerate(torch.split(x_SH, _counts(experts, chosen_NK).tolist()))
    y_SH = torch.cat([expert(e, x) for e, x in parts if len(x)] or [expert(0, x_SH)])
    y_SH = y_SH * share_NK.flatten()[order_S, None]
    y_NKH = y_SH[order_S.argsort()].view(*chosen_NK.shape, y_SH.shape[1])
    return y_NKH.sum(dim=1).to(hidden_NH.dtype)


def _counts(experts: Any, chosen_NK: Tensor) -> Tensor:
    return torch.bincount(chosen_NK.flatten(), minlength=experts.num_experts)


def _plain(experts: Any) -> bool:
    return all(experts.precision.now(name) is None for name in experts.precision.sides)


def _as_asked(experts: Any, *args: Tensor) -> Tensor:
    own = type(experts).forward.__wrapped__
    forward = ALL_EXPERTS_FUNCTIONS.get_interface(experts.precision.asked, own)
    output: Tensor = forward(experts, *args)
    return output


def _expert(experts: Any) -> Callable[[int, Tensor], Tensor]:
    """What one expert computes: (expert, its tokens [S, H]) to [S, H]."""
    up, down = (_projection(experts, name) for name in experts.precision.sides)
    act = experts._apply_gate if experts.has_gate else experts.act_fn
    # an activation is taken of one expert's tokens too: its last bit can depend on the size
    if not experts.has_post_expert_norm:
        return lambda e, x_SH: down(e, act(up(e, x_SH)))
    norm = experts.post_expert_norm
    return lambda e, x_SH: cast(Tensor, norm(down(e, act(up(e, x_SH)))))


def _projection(experts: Any, name: str) -> Callable[[int, Tensor], Tensor]:
    """One fused parameter as E linear layers: (expert, its tokens [S, I]) to [S, O]."""
    fused = getattr(experts, name)
    # one node of the graph for all slices: its backward writes each expert's gradient once
    weights_E = (fused.mT if experts.is_transposed else fused).unbind()
    biases_E = getattr(experts, f"{name}_bias").unbind() if experts.has_bias else None
    precision, switch = experts.precision.now(name), experts.precision.switch

    def linear(e: int, x_SI: Tensor) -> Tensor:
        bias_O = None if biases_E is None else biases_E[e]
        if precision is None:
            return F.linear(x_SI, weights_E[e], bias_O)
        return _low_precision_linear(
            x_SI, weights_E[e], bias_O, precision, switch, key=(experts, name, e)
        )

    return linear


def _low_precision_linear(
    x_SI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    precision: LinearPrecision,
    switch: SideSwitch,
    key: Hashable,
) -> Tensor:
    """As `QuantLinear.forward` does it."""
    inner_SI = x_SI.to(gemm_dtype(x_SI, *precision.operands))
    with torch.autocast(x_SI.device.type, enabled=False):
        y_SO = quantized_linear(inner_SI, weight_OI, precision, switch, key=key)
        if bias_O is not None:
            y_SO = y_SO + bias_O.to(y_SO.dtype)
    return y_SO.to(output_dtype(x_SI))


ALL_EXPERTS_FUNCTIONS.register(EAGER, _eager)
ALL_EXPERTS_FUNCTIONS.register(GROUPED, _grouped)
