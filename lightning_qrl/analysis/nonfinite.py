"""Where numbers stop being finite: the first layer, found by computing a loss once more.

Hooks on every module see the forward in order of execution and the backward in its order, which
costs too much to have on all the time. What is named is, in this order,

1. the first module whose output is not finite although its inputs are (or its weight, if that is
   not finite itself);
2. the loss, if all outputs are finite;
3. the first module in the backward whose gradient is not finite although the one that came in is.
   The backward looks at modules without children, so what is computed between these is put down
   to the module that it reaches first.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn


def first_nonfinite(model: nn.Module, losses: Sequence[Callable[[], Tensor]]) -> str | None:
    """What is not finite first when a model is trained on some micro-batches.

    Args:
        model: its gradients and its random state are left as they are.
        losses: each computes the loss of a micro-batch by the model.

    Returns:
        A phrase such as ``the output of model.layers.3.mlp``; None if all is finite.
    """
    for loss in losses:
        found = _first_of(model, loss)
        if found is not None:
            return found
    return None


def first_nonfinite_output(model: nn.Module, compute: Callable[[], object]) -> str | None:
    """The first module whose output is not finite although its inputs are.

    Args:
        model: its random state is left as it is.
        compute: runs the model; it may raise what numbers that are not finite lead to.

    Returns:
        A phrase such as ``the weight of model.layers.3.mlp.up_proj``; None if all is finite.
    """
    found: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(_forward_hook(name, found)).remove)
        with suppress(Exception):
            compute()
    return found[0] if found else None


def first_nonfinite_tensor(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """The name of the first of some tensors that is not finite; None if all are."""
    return next((name for name, t in named if t is not None and not _finite(t)), None)


def nonfinite_gradient(model: nn.Module) -> str | None:
    """The first parameter whose gradient is not finite, by its full name."""
    return first_nonfinite_tensor((name, p.grad) for name, p in model.named_parameters())


def largest_gradient(model: nn.Module) -> str:
    """The parameter whose gradient has the largest norm, by its full name."""
    norms = {
        name: float(torch.linalg.vector_norm(p.grad))
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return max(norms, key=norms.__getitem__, default="")


def _first_of(model: nn.Module, loss: Callable[[], Tensor]) -> str | None:
    forward: list[str] = []
    backward: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of backward hooks where nothing needs a gradient
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(_forward_hook(name, forward)).remove)
            if not any(module.children()):
                hook = module.register_full_backward_hook(_backward_hook(name, backward))
                stack.callback(hook.remove)
        value = loss()
        if forward:
            return forward[0]
        if not value.isfinite():
            return "the loss, of finite outputs"
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        grads = torch.autograd.grad(value, [p for _, p in named], allow_unused=True)
    if backward:
        return backward[0]
    pairs = zip((name for name, _ in named), grads, strict=True)
    bad = first_nonfinite_tensor(pairs)
    return None if bad is None else f"the gradient of {bad}"


def _forward_hook(name: str, found: list[str]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if not _finite(output) and _finite(inputs):
            sound = all(_finite(p) for p in module.parameters(recurse=False))
            found.append(f"the {'output' if sound else 'weight'} of {name or 'the model'}")

    return hook


def _backward_hook(name: str, found: list[str]) -> Callable[..., None]:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if not _finite(grad_output) or not _finite(grad_input):
            found.append(f"the gradient of {name or 'the model'}")

    return hook


def _finite(value: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in _tensors(value) if t.is_floating_point())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (t for part in value.values() for t in _tensors(part))
    elif isinstance(value, tuple | list):
        yield from (t for part in value for t in _tensors(part))
