"""pass@k against every subset of k completions."""

from itertools import combinations

import pytest
import torch

from lightning_qrl.analysis.pass_at_k import pass_at_k


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_the_share_of_subsets_with_a_right_completion(samples):
    solved = torch.arange(samples + 1)
    for k in range(1, samples + 1):
        want = []
        for right in range(samples + 1):
            subsets = list(combinations([True] * right + [False] * (samples - right), k))
            want.append(sum(map(any, subsets)) / len(subsets))
        got = pass_at_k(solved, samples, k)
        assert got.dtype == torch.float64
        assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_many_samples_keep_their_digits():
    # 1 of 10 000 solves: a subset of k holds it with chance k / 10 000
    assert pass_at_k(torch.tensor([1]), 10_000, 7).item() == pytest.approx(7e-4, rel=1e-9)
    assert pass_at_k(torch.tensor([0, 10_000]), 10_000, 5_000).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"k must be between 1 and 4 samples, got {k}"):
        pass_at_k(torch.tensor([1]), 4, k)
