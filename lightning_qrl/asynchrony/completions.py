"""Completions in parts: more tokens after the ones there are, and plain tensors for a checkpoint.

Written over the fields of `Completion`, whatever they are: each is a tensor, a tuple of integers, a
truth value, or None.

N tokens, K of each token.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_qrl.experience import Completion

FIELDS = tuple(field.name for field in fields(Completion))


def join(begun: Completion, more: Completion) -> Completion:
    """A completion and what was sampled after it.

    Args:
        begun: the first tokens.
        more: the next ones, with the prompt and the first tokens as their prompt.

    Returns:
        One completion. What belongs to a token (fields in ``_N``) is kept as it was sampled; so are
        the experts of the first tokens, although the engine ran these through the policy again.
    """
    values: dict[str, Any] = {"prompt_ids": begun.prompt_ids, "truncated": more.truncated}
    for name in FIELDS:
        if name in values:
            continue
        first, then = getattr(begun, name), getattr(more, name)
        if first is None or then is None:
            values[name] = None
        elif name == "routes_TLK":  # of all tokens that were read
            values[name] = torch.cat([first, then[len(first) :]])
        else:
            width = max(first.shape[-1], then.shape[-1]) if first.dim() > 1 else 0
            values[name] = torch.cat([_widen(first, width), _widen(then, width)])
    return Completion(**values)


def _widen(rows_NK: Tensor, width: int) -> Tensor:
    if rows_NK.dim() == 1:
        return rows_NK
    return F.pad(rows_NK, (0, width - rows_NK.shape[-1]), value=-1)


def pack(completions: Sequence[Completion]) -> dict[str, dict[str, Tensor]]:
    """Completions as a few tensors: of each field all values, and the shape of each."""
    packed = {}
    for name in FIELDS:
        values = [getattr(completion, name) for completion in completions]
        if any(value is not None for value in values):
            tensors = [torch.as_tensor(value) for value in values]
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            shapes = torch.tensor([list(tensor.shape) for tensor in tensors])
            packed[name] = {"values": flat, "shapes": shapes}
    return packed


def unpack(packed: dict[str, dict[str, Tensor]], count: int) -> list[Completion]:
    """What was packed: ``count`` completions."""
    columns: dict[str, Sequence[Any]] = {name: [None] * count for name in FIELDS}
    for name, stored in packed.items():
        shapes = stored["shapes"].long()
        sizes = shapes.prod(dim=1).tolist()
        parts = torch.split(stored["values"], sizes)
        columns[name] = [p.view(s) for p, s in zip(parts, shapes.tolist(), strict=True)]
    if count:
        columns["prompt_ids"] = [tuple(ids.tolist()) for ids in columns["prompt_ids"]]
        columns["truncated"] = [bool(value) for value in columns["truncated"]]
    rows = zip(*columns.values(), strict=True)
    return [Completion(**dict(zip(columns, row, strict=True))) for row in rows]
