"""Packing against a string of bits."""

import pytest
import torch

from lightning_qrl.formats import get_format
from lightning_qrl.formats.packing import pack, packed_length, unpack

WIDTHS = range(1, 9)


def as_bits(number: int, width: int) -> str:
    """Lowest bit first."""
    return format(number, f"0{width}b")[::-1]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 64, 100])
def test_a_row_is_one_string_of_bits(bits: int, length: int):
    codes = torch.randint(1 << bits, (5, length), generator=torch.Generator().manual_seed(length))
    codes = codes.to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (5, packed_length(length, bits))
    for row, stored in zip(codes.tolist(), packed.tolist(), strict=True):
        written = "".join(as_bits(code, bits) for code in row)
        read = "".join(as_bits(byte, 8) for byte in stored)
        assert read.startswith(written)
        assert set(read[len(written) :]) <= {"0"}
    assert torch.equal(unpack(packed, bits, length), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_at_every_place_of_a_byte(bits: int):
    every = torch.arange(1 << bits).repeat_interleave(8)
    for shift in range(8):
        codes = every.roll(shift).to(torch.uint8)
        assert torch.equal(unpack(pack(codes, bits), bits, len(codes)), codes)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 4), (2, 3, 5)])
def test_any_leading_shape_and_nothing(bits: int, shape: tuple[int, ...]):
    codes = torch.ones(shape, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (*shape[:-1], packed_length(shape[-1], bits))
    assert torch.equal(unpack(packed, bits, shape[-1]), codes)


def test_strides_do_not_matter():
    codes = torch.randint(16, (16, 24), dtype=torch.uint8)
    for view in (codes.t(), codes[:, ::3], codes[:, 1:], codes[3:, 5:]):
        for bits in (4, 5):
            assert torch.equal(pack(view, bits), pack(view.clone(), bits))
            packed = pack(view, bits)[:, 1:]
            assert torch.equal(unpack(packed, bits, 8), unpack(packed.clone(), bits, 8))


def test_the_first_code_has_the_low_bits():
    assert pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03]
    assert pack(torch.tensor([1, 2, 3, 1], dtype=torch.uint8), 2).tolist() == [0b01_11_10_01]
    six = pack(torch.tensor([63, 0, 63, 0], dtype=torch.uint8), 6)
    assert six.tolist() == [0x3F, 0xF0, 0x03]


@pytest.mark.parametrize(
    ("name", "per_1024"),
    [
        ("nvfp4", 512 + 64),
        ("mxfp4", 512 + 32),
        ("mxfp6_e2m3", 768 + 32),
        ("int3", 384),
        ("e3m0", 512),
    ],
)
def test_a_tensor_takes_the_bytes_of_its_format(name: str, per_1024: int):
    x = torch.randn(8, 1024)
    q = get_format(name).quantize(x)
    outer = 0 if q.outer_scale is None else q.outer_scale.nbytes
    assert q.nbytes - outer == 8 * per_1024 == get_format(name).bits * x.numel() / 8
