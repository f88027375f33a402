"""The soft length penalty, by hand; masking is a promise of every loss (tests/losses)."""

import math

import pytest
import torch

from lightning_qrl.overlong import Overlong


def dapo(length, limit, buffer):
    """Equation 13 of arXiv 2503.14476, case by case."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize("buffer", [1, 3, 10])
@pytest.mark.parametrize("penalty", [1.0, 0.25])
def test_every_length(buffer, penalty):
    lengths = torch.arange(11).view(1, 11)
    got = Overlong(overlong_buffer=buffer, overlong_penalty=penalty).penalties(lengths, 10)
    assert got.shape == lengths.shape
    assert got.dtype == torch.float32
    assert got[0].tolist() == pytest.approx([penalty * dapo(n, 10, buffer) for n in range(11)])


def test_without_a_buffer_there_is_no_penalty():
    assert not Overlong().penalties(torch.arange(11), 10).any()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"overlong_buffer": -1}, "overlong_buffer must be at least 0, got -1"),
        ({"overlong_penalty": 0.0}, "overlong_penalty must be above 0 and finite, got 0.0"),
        ({"overlong_penalty": -1.0}, "overlong_penalty must be above 0"),
        ({"overlong_penalty": math.inf}, "overlong_penalty must be above 0"),
        ({"overlong_penalty": math.nan}, "overlong_penalty must be above 0"),
    ],
)
def test_numbers_out_of_range(wrong, says):
    with pytest.raises(ValueError, match=says):
        Overlong(**wrong)
