"""Random Hadamard transform: spread an outlier over its neighbours before they share a scale.

    rotate(x) = H (s * x) / sqrt(K)        K = 16 or 32 neighbours along the last axis

H is Sylvester's Hadamard matrix and s a fixed vector of signs, so the transform is orthogonal.
Where both operands of a GEMM are rotated along the axis that is summed, the rotations cancel and
need not be undone (NVIDIA's NVFP4 pretraining, arXiv 2509.25149: 16, one fixed sign vector).

The sums are formed by butterflies, in one order for every shape: a row's numbers do not depend on
the rows beside it, as those of a matrix product could. A row whose length is no multiple of K is
filled up with zeros; all of the filled row is then needed to rotate back. A NaN or an infinity
makes all K values NaN that it is rotated with. Rotated values beyond FP32 saturate.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Hadamard = Literal["none", 16, 32]

LARGEST_FP32 = torch.finfo(torch.float32).max
SIGN_BITS = 0x243F6A88  # the fraction of pi: 32 bits that nobody chose


def rotate(x: Tensor, size: Hadamard) -> Tensor:
    """Rotate along the last axis.

    Args:
        x: FP32 [..., n].
        size: K, or "none".

    Returns:
        FP32 [..., n filled up to a multiple of K]; x itself for "none".
    """
    if size == "none":
        return x
    missing = -x.shape[-1] % size
    x = functional.pad(x, (0, missing)) if missing else x
    return _butterflies(_by_sign(x, size), size)


def rotate_back(x: Tensor, size: Hadamard, length: int) -> Tensor:
    """Undo `rotate` and cut the last axis to `length`."""
    if size == "none":
        return x[..., :length]
    return _by_sign(_butterflies(x, size), size).add_(0.0)[..., :length]  # one zero


def _by_sign(x: Tensor, size: int) -> Tensor:
    signs = [1.0 - 2.0 * (SIGN_BITS >> i & 1) for i in range(size)]
    signs_K = torch.tensor(signs, device=x.device)
    return (x.reshape(-1, size) * signs_K).view(x.shape)


def _butterflies(x: Tensor, size: int) -> Tensor:
    half = 1
    y = x * (1 / size)  # sums of K cannot overflow
    while half < size:
        pairs = y.reshape(-1, 2, half)
        first, second = pairs[:, 0], pairs[:, 1]
        y = torch.stack([first + second, first - second], 1)
        half *= 2
    y = torch.where(y.isinf(), math.nan, y) * math.sqrt(size)
    return y.clamp(-LARGEST_FP32, LARGEST_FP32).view(x.shape)
