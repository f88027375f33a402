"""Batches for losses: random ragged ones off policy, and small ones given token by token."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_qrl.experience import Completion, Experience, make_experience


@pytest.fixture(scope="session")
def off_policy(ragged: Callable[..., Experience]) -> Callable[..., tuple[Tensor, Experience]]:
    """A ragged batch with a reference, and log-probabilities of a policy that moved away.

    Its log-ratios have the standard deviation ``spread``; 0 is on policy.
    """

    def make(seed: int, spread: float = 0.5, rows: int = 8) -> tuple[Tensor, Experience]:
        experience = ragged(seed, rows=rows)
        g = torch.Generator().manual_seed(seed)
        drift_BS, apart_BS = torch.randn(2, *experience.mask_BS.shape, generator=g)
        reference_BS = experience.logprobs_BS + apart_BS
        logprobs_BS = (experience.logprobs_BS + spread * drift_BS).requires_grad_()
        return logprobs_BS, replace(experience, reference_BS=reference_BS)

    return make


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Experience]:
    """Completions from the sampler's log-probabilities of their tokens, and their advantages."""

    def make(
        logprobs: Sequence[Sequence[float]], advantages: Sequence[float], limit: int | None = None
    ) -> Experience:
        completions = [
            Completion(
                prompt_ids=(0,),
                token_ids_N=torch.zeros(len(row), dtype=torch.int64),
                logprobs_N=torch.tensor(row),
                versions_N=torch.zeros(len(row), dtype=torch.int64),
                truncated=False,
            )
            for row in logprobs
        ]
        rewards_B = torch.zeros(len(advantages))
        advantages_B = torch.tensor(advantages)
        return make_experience(completions, rewards_B, advantages_B, 0, max_new_tokens=limit)

    return make
