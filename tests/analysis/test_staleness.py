"""Staleness by bucket, against plain counting."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from lightning_qrl.analysis.staleness import staleness
from lightning_qrl.metrics import Tally

NAMES = {0: "lag_0", 3: "lag_3", 7: "lag_7", 8: "lag_8_15", 15: "lag_8_15", 16: "lag_16_31"}
NAMES |= {31: "lag_16_31", 32: "lag_32_63"}
NOW = 40


@pytest.fixture
def aged(ragged):
    """A batch whose tokens have the ages in `NAMES`."""
    batch = ragged(3, rows=40)
    ages = torch.tensor(list(NAMES))
    index = torch.arange(batch.versions_BS.numel()).view_as(batch.versions_BS)
    return replace(batch, versions_BS=NOW - ages[index % len(ages)])


def test_shares_and_kl_by_bucket(aged):
    torch.manual_seed(0)
    logprobs = aged.logprobs_BS + torch.randn_like(aged.logprobs_BS)
    by_name, ages = defaultdict(list), []
    for b, s in aged.mask_BS.nonzero().tolist():
        age = NOW - int(aged.versions_BS[b, s])
        d = float(logprobs[b, s]) - float(aged.logprobs_BS[b, s])
        by_name[NAMES[age]].append(math.exp(d) - d - 1)
        ages.append(age)
    want = {"async/staleness_mean": sum(ages) / len(ages), "async/staleness_max": max(ages)}
    want |= {f"async/staleness/lag_{k}": 0 for k in range(8)}
    want |= {f"async/staleness/{name}": len(k3) / len(ages) for name, k3 in by_name.items()}
    want |= {f"async/k3_kl/{name}": sum(k3) / len(k3) for name, k3 in by_name.items()}
    got = staleness(logprobs, aged, NOW, 32)
    assert {name: metric.value() for name, metric in got.items()} == pytest.approx(want, rel=1e-5)
    # the same from micro-batches, in which some buckets are empty
    tally = Tally()
    for part in torch.arange(len(aged)).tensor_split(20):
        rows = aged.take(part)
        tally.add(staleness(logprobs[part][:, : rows.mask_BS.shape[1]], rows, NOW, 32))
    assert tally.flush() == pytest.approx(want, rel=1e-5)


def test_a_batch_without_tokens(ragged):
    batch = ragged(0)
    nothing = replace(batch, mask_BS=torch.zeros_like(batch.mask_BS))
    values = {n: m.value() for n, m in staleness(batch.logprobs_BS, nothing, 3, 0).items()}
    assert values == {
        "async/staleness_mean": 0,
        "async/staleness_max": 0,
        "async/staleness/lag_0": 0,
    }
