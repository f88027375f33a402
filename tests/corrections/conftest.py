"""Batches whose trainer is another policy than their sampler."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_qrl.experience import Experience
from lightning_qrl.logprobs import Scores


@pytest.fixture(scope="session")
def apart(ragged: Callable[..., Experience]) -> Callable[..., tuple[Tensor, Experience]]:
    """A ragged batch in groups of two, and log-probabilities of a trainer that moved away.

    Log-ratios have the standard deviation ``spread``, those since the first update (with
    ``proximal``) a small one; 0 is a trainer that is the sampler.
    """

    def make(
        seed: int, spread: float = 0.7, proximal: bool = False, rows: int = 8
    ) -> tuple[Tensor, Experience]:
        e = ragged(seed, rows=rows)
        g = torch.Generator().manual_seed(100 + seed)
        drift_BS, since_BS, teacher_BS = torch.randn(3, *e.mask_BS.shape, generator=g)
        trainer_BS = e.logprobs_BS + spread * drift_BS
        logprobs_BS = trainer_BS + (0.15 * since_BS if proximal else 0.0)
        e = replace(
            e,
            reference_BS=e.logprobs_BS + teacher_BS,
            proximal_BS=trainer_BS if proximal else None,
            group_B=torch.arange(rows) // 2,
        )
        return logprobs_BS.requires_grad_(), e

    return make


@pytest.fixture(scope="session")
def scores_of() -> Callable[[Tensor], Scores]:
    """What a policy makes of tokens, of which only the log-probabilities matter."""

    def make(logprobs_BS: Tensor) -> Scores:
        zeros_BS = torch.zeros_like(logprobs_BS.detach())
        return Scores(logprobs_BS, zeros_BS, zeros_BS)

    return make
