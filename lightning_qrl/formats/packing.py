"""Packing: codes of fewer than 8 bits side by side in bytes, along the last axis.

The lowest bits of a byte hold the first code, as in torchao and Transformer Engine. Codes whose
width does not divide 8 run across bytes: four 6-bit codes take three bytes. A row ends on a byte.

Eight codes, a byte each, are one int64, whose unused bits are squeezed out in three steps: few
passes over an eighth of the elements. (The machine is little-endian, as all that PyTorch runs on.)
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 8  # codes of any width that fill whole bytes


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes.

    Args:
        codes: uint8 [..., n], each below 2^bits.
        bits: width of a code, 1 to 8.

    Returns:
        uint8 [..., ceil(n * bits / 8)].
    """
    if bits == 8:
        return codes
    length = codes.shape[-1]
    if not codes.numel():
        return codes.new_empty(*codes.shape[:-1], packed_length(length, bits))
    missing = -length % (2 if bits == 4 else GROUP)
    codes = functional.pad(codes, (0, missing)) if missing else codes.contiguous()
    if bits == 4:  # two bytes seen as one number
        pairs = codes.view(torch.int16)
        return (pairs | pairs >> 4).to(torch.uint8)
    words = codes.view(torch.int64)
    for gap, low, high in _closings(bits):
        words = (words & low) | ((words >> gap) & (high >> gap))
    groups = words.view(torch.uint8).view(*words.shape, GROUP)[..., :bits]
    return groups.flatten(-2)[..., : packed_length(length, bits)]


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Undo `pack`.

    Args:
        packed: uint8 [..., bytes].
        bits: width of a code.
        length: n, the number of codes in a row.

    Returns:
        uint8 [..., n].
    """
    if bits == 8:
        return packed
    if not length or not packed.numel():
        return packed.new_empty(*packed.shape[:-1], length)
    if bits == 4:
        pairs = packed.to(torch.int16)
        return ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)[..., :length]
    groups = functional.pad(packed, (0, -packed.shape[-1] % bits))
    groups = groups.view(*packed.shape[:-1], groups.shape[-1] // bits, bits)
    words = functional.pad(groups, (0, GROUP - bits)).view(torch.int64)[..., 0]
    for gap, low, high in reversed(_closings(bits)):
        words = (words & low) | ((words << gap) & high)
    return words.view(torch.uint8)[..., :length]


def packed_length(length: int, bits: int) -> int:
    """Bytes of a packed row of `length` codes."""
    return (length * bits + 7) // 8


@functools.cache
def _closings(bits: int) -> tuple[tuple[int, int, int], ...]:
    """How 8 bytes of `bits` used bits each close up in an int64: in pairs, fours, eights.

    Each step is the gap between the two neighbours of a pair, and the masks of the lower and of the
    upper ones before it.
    """
    steps = []
    for lane in (8, 16, 32):
        used = bits * lane // 8
        lows = sum(((1 << used) - 1) << start for start in range(0, 64, 2 * lane))
        steps.append((lane - used, lows, lows << lane))
    return tuple(steps)
