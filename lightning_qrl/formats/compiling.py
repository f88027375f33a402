"""Compiling: large tensors go through fused kernels that torch.compile makes of our functions.

A number must not depend on the size of the tensor that it is in. So a kernel is made at the first
large tensor and trusted only if its results equal those of the plain function bit for bit; one that
differs (a compiler that flushes subnormals, say) is dropped with a warning. It then serves all but
the smallest tensors, which are not worth a compiled call. Without a working compiler everything
computes eagerly, with one warning, several times slower; a compiler that failed is not tried again.

Compilation happens once a process for each format, at its first large tensor, for all sizes at
once. PyTorch keeps the kernels on disk (`TORCHINDUCTOR_CACHE_DIR`), so a later process only loads
them. `TORCH_COMPILE_DISABLE=1` turns all of it off.
"""

import functools
import math
import os
import warnings
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

ENOUGH = 1 << 15  # elements of a tensor that a kernel is made, and tried, on
WORTHWHILE = 1 << 8  # elements; below, a call of a kernel costs more than it saves


def compiled(*, odd: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a pure function compile itself for large tensors.

    The function's first argument is hashable and decides the kernel, the others are contiguous
    tensors, which it leaves alone, or None; its result is a tensor, or a tuple of tensors and
    Nones.

    Args:
        odd: the first tensor may hold anything (NaN, infinities, subnormals): the kernel is tested
            with that too.
    """
    return lambda function: _dispatcher(function, odd)


def _dispatcher(function: Callable[P, R], odd: bool) -> Callable[P, R]:
    kernels: dict[Hashable, Callable[..., Any]] = {}

    @functools.wraps(function)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        static, *given_tensors = args
        tensors: list[Any] = list(given_tensors)
        given = [t for t in tensors if isinstance(t, Tensor)]
        first = given[0]
        if torch.compiler.is_compiling() or first.numel() < WORTHWHILE or not _possible(first):
            return function(*args, **kwargs)
        # Sizes of one are another kernel to the compiler.
        ones = tuple(tuple(size == 1 for size in t.shape) for t in given)
        key = (static, first.device, ones, torch.is_inference_mode_enabled())
        if key not in kernels and first.numel() < ENOUGH:
            return function(*args, **kwargs)
        with torch.no_grad():
            tensors = [_at_start(t) for t in tensors]
            if key not in kernels:
                kernels[key] = _make(function, static, tensors, odd)
            result: R = kernels[key](*tensors)
        return result

    return dispatch


def _at_start(tensor: Any) -> Any:
    """A tensor at the start of its memory: to the compiler, any other place is another kernel."""
    elsewhere = isinstance(tensor, Tensor) and tensor.storage_offset()
    return tensor.clone() if elsewhere else tensor


def apart(per_block: Tensor) -> Tensor:
    """Ask the compiler to compute something small on its own, in vectors.

    It would fuse it into the loop over elements and compute it one block at a time.
    """
    if not torch.compiler.is_compiling():
        return per_block
    return torch.as_strided(per_block, per_block.shape, per_block.stride())


def as_bytes(codes: Tensor) -> Tensor:
    """Small non-negative int32 numbers as uint8.

    The compiler converts floats to bytes in vectors, but int32 numbers one at a time.
    """
    return (codes.float() if torch.compiler.is_compiling() else codes).to(torch.uint8)


def is_number(x: Tensor) -> Tensor:
    """Whether each is no NaN; `isnan` would be compiled to a call for each element."""
    return x == x  # noqa: PLR0124


def _make(
    function: Callable[..., Any], static: Any, tensors: list[Any], odd: bool
) -> Callable[..., Any]:
    """A kernel that has shown that it agrees with the plain function; else the plain function."""
    from torch._dynamo.exc import TorchDynamoException  # slow to import, and not always needed

    def kernel(*args: Any) -> Any:
        return function(static, *args)

    fast: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]  # lacks the last one
        kernel, dynamic=False, fullgraph=True, isolate_recompiles=True
    )
    for tensor in filter(torch.is_tensor, tensors):
        for axis in range(min(tensor.ndim, 2)):  # any size; the third, K, is the format's own
            torch._dynamo.maybe_mark_dynamic(tensor, axis)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's deprecations, which some make errors
            agrees = _same(fast(*tensors), kernel(*tensors))
        if odd:
            strange = [_strange(tensors[0]), *tensors[1:]]
            agrees &= _same(fast(*strange), kernel(*strange))
    except TorchDynamoException as error:  # whatever it is: no compiler, none that works, ...
        _failed.add(tensors[0].device.type)
        _warn(f"number formats compute uncompiled, several times slower: {_reason(error)}")
        return kernel
    if not agrees:
        _warn(f"{static} computes uncompiled, since its compiled kernel differs in some bit")
        return kernel
    return fast


def _strange(x: Tensor) -> Tensor:
    """What arithmetic trips over strewn into x, so that most rows and blocks hold none of it."""
    x = x.clone()
    flat = x.view(-1)
    for i, value in enumerate([math.nan, math.inf, -math.inf, 3e38, 1e-45, -0.0]):
        flat[i * 5003 % flat.numel()] = value
    for parts in (x.view(-1, x.shape[-1]), x):  # blocks, rows
        if len(parts) > 4:
            parts[len(parts) // 2] *= 1e-38
            parts[len(parts) // 3] *= 1e-44
            parts[len(parts) // 4] = 0.0
    return x


def _same(a: Any, b: Any) -> bool:
    """Equal bits, any NaN being equal to any other."""
    if isinstance(a, tuple):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    if a is None or not a.is_floating_point():
        return a is b or torch.equal(a, b)
    nan = a.isnan()
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    same_bits = (a.contiguous().view(bits) == b.contiguous().view(bits)) | (nan & b.isnan())
    return bool(same_bits.all())


_failed: set[str] = set()  # types of the devices that compilation has failed for


def _possible(tensor: Tensor) -> bool:
    device = tensor.device.type
    off = os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # torch's own switch
    return device in ("cpu", "cuda") and device not in _failed and not off


def _reason(error: Exception) -> str:
    """In one line."""
    cause = getattr(error, "inner_exception", error)
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=6)
