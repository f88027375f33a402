"""Which norms feed the linear layers: found by running the model, not by their names.

A decoder layer names its norms as its authors liked, and has others besides: of queries and keys,
of what attention or the MLP wrote. What a norm is for shows in who reads its output. Two tokens go
through the model, and whatever linear layer of the decoder gets the very memory that a norm wrote
(as it is, or in another shape) reads that norm.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_qrl.precision.select import find_linears


@torch.no_grad()
def feeding_norms(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Weights of the norms that linear layers of the decoder read, by the norms' names.

    Raises:
        ValueError: the model has no decoder layers, or they hold no linear layer.
    """
    written: dict[int, nn.Module] = {}  # norms by the address of what they wrote
    kept: list[Tensor] = []  # so that no address is used again
    read: set[nn.Module] = set()

    def wrote(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept.append(output)
        written[_address(output)] = norm

    def reads(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        norm = written.get(_address(inputs[0]))
        if norm is not None:
            read.add(norm)

    hooks = [norm.register_forward_hook(wrote) for norm in filter(_is_norm, model.modules())]
    hooks += [linear.register_forward_pre_hook(reads) for linear in _decoder_linears(model)]
    try:
        model(input_ids=torch.arange(2, device=model.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: module.get_parameter("weight")
        for name, module in model.named_modules()
        if module in read
    }


def _is_norm(module: nn.Module) -> bool:
    """Whether its weight is a vector that scales what a "norm" puts out."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor) and weight.ndim == 1 and "norm" in type(module).__name__.lower()
    )


def _decoder_linears(model: nn.Module) -> list[nn.Module]:
    """Linear layers, and modules of fused experts, whose names stand for their parameters."""
    modules = dict(model.named_modules())
    names = find_linears(model).decoder
    found = {modules.get(name) or modules[name.rpartition(".")[0]] for name in names}
    return [module for module in modules.values() if module in found]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
