"""Drawing by inverting the distribution function: exact shares, to the last token of the tail."""

import pytest
import torch

from lightning_qrl.rollouts._draw import draw

LAST = 1 - 2.0**-53  # the largest number that the generator returns


def rows(*indices):
    return torch.tensor(indices)


def uniform(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_tokens_get_their_shares_of_the_unit_interval():
    p_DV = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.05, 0.2, 0.05]])
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    row_N = torch.tensor([0, 1]).repeat_interleave(1000)
    tokens = draw(p_DV.log(), row_N, grid.repeat(2)).view(2, 1000)
    counts = torch.stack([row.bincount(minlength=4) for row in tokens])
    assert (counts - 1000 * p_DV).abs().max() <= 1


@pytest.mark.parametrize("number", [1, 513, 4097])
def test_what_is_impossible_is_never_drawn(number):
    row = torch.tensor([0, 0.5, 0, 0, 0.5, 0]).log()
    last = number - 1
    tokens = draw(row.expand(number, -1), rows(last, last, 0, 0), uniform(0.0, LAST, 0.0, LAST))
    assert tokens.tolist() == [1, 4, 1, 4]


def test_a_long_tail_keeps_its_probability():
    vocabulary, tail = 50_001, 5e-9  # each below the resolution of FP32 beside 1
    p = torch.full((1, vocabulary), tail, dtype=torch.float64)
    p[0, 0] = 1 - tail * (vocabulary - 1)
    numbers = uniform(0.5, 1 - 100.5 * tail, 1 - 0.5 * tail)
    tokens = draw(p.log().float(), rows(0, 0, 0), numbers)
    assert tokens[0] == 0
    # log-probabilities arrive in FP32: 1e-7 of the head are some 10 tokens of the tail
    assert abs(int(tokens[1]) - (vocabulary - 101)) < 20
    assert tokens[2] == vocabulary - 1


def test_a_row_whose_probabilities_do_not_quite_add_up_is_normalized():
    logprobs = torch.tensor([[0.25, 0.25, 0.25, 0.2499]]).log()
    assert draw(logprobs, rows(0), uniform(LAST)).tolist() == [3]
