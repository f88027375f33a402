"""Mismatch metrics against their formulas in numpy float64, completion by completion."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_qrl.analysis.mismatch import rollout_correction, sampling_mismatch
from lightning_qrl.experience import split_for_updates
from lightning_qrl.metrics import Tally


def random_case(ragged, seed, scale=0.7):
    e = ragged(seed)
    g = torch.Generator().manual_seed(seed)
    return e, e.logprobs_BS + scale * torch.randn(e.mask_BS.shape, generator=g)


def rows(e, logprobs):
    """(trainer, sampler) log-probabilities of each completion that has tokens, float64."""
    masks = e.mask_BS.numpy()
    pairs = zip(logprobs.double().numpy(), e.logprobs_BS.double().numpy(), masks, strict=True)
    return [(t[m], s[m]) for t, s, m in pairs if m.any()]


def clamped(x):
    return np.clip(x, -20, 20)


def effective(w):
    return w.sum() ** 2 / (len(w) * (w**2).sum())


def verl(e, logprobs):
    """The off-policy metrics as verl 0.10 defines them (rollout_corr_helper.py), and ours."""
    per_row = rows(e, logprobs)
    d = np.concatenate([t - s for t, s in per_row])
    train = np.array([t.mean() for t, _ in per_row])
    rollout = np.array([s.mean() for _, s in per_row])
    sums = np.array([(t - s).sum() for t, s in per_row])
    diff = rollout - train
    return {
        "kl": -d.mean(),
        "k3_kl": (np.exp(d) - d - 1).mean(),
        "training_ppl": np.exp(-train).mean(),
        "training_log_ppl": -train.mean(),
        "rollout_ppl": np.exp(-rollout).mean(),
        "rollout_log_ppl": -rollout.mean(),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": np.abs(diff).mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "ppl_ratio": np.exp(diff).mean(),
        "chi2_token": (np.exp(clamped(d)) ** 2).mean() - 1,
        "chi2_seq": np.exp(2 * clamped(sums)).mean() - 1,
        "ess_token": effective(np.exp(d)),
        "ess_seq": effective(np.exp(sums)),
        "extreme_fraction": np.mean((np.exp(d) > 2) | (np.exp(d) < 0.5)),
    }


@pytest.mark.parametrize("seed", range(4))
def test_verl_family(seed, ragged):
    e, logprobs = random_case(ragged, seed)
    got = {name: metric.value() for name, metric in rollout_correction(logprobs, e).items()}
    assert got == pytest.approx(verl(e, logprobs), rel=2e-5, abs=1e-6)


def test_a_shift_of_all_log_probabilities_moves_the_extremes_past_zero(ragged):
    # a completion without tokens has no gap; taken as 0, it would be the maximum or the minimum
    for shift in (-1.0, 1.0):
        e, _ = random_case(ragged, 0)
        metrics = rollout_correction(e.logprobs_BS + shift, e)
        assert metrics["log_ppl_diff_max"].value() == pytest.approx(-shift, abs=1e-6)
        assert metrics["log_ppl_diff_min"].value() == pytest.approx(-shift, abs=1e-6)


@pytest.mark.parametrize("shift", [12.0, -12.0, 80.0])
def test_log_ratios_are_clamped_before_they_are_doubled(shift, ragged):
    e, _ = random_case(ragged, 0)
    logprobs = e.logprobs_BS + shift
    got = rollout_correction(logprobs, e)
    want = verl(e, logprobs)
    assert got["chi2_token"].value() == pytest.approx(want["chi2_token"], rel=1e-4)
    assert got["chi2_seq"].value() == pytest.approx(want["chi2_seq"], rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_trl_family(seed, ragged):
    e, logprobs = random_case(ragged, seed)
    d = np.concatenate([t - s for t, s in rows(e, logprobs)])
    got = {name: metric.value() for name, metric in sampling_mismatch(logprobs, e).items()}
    assert got == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": np.abs(d).mean(),
            "sampling/sampling_logp_difference/max": np.abs(d).max(),
            "sampling/importance_sampling_ratio/min": np.exp(d).min(),
            "sampling/importance_sampling_ratio/mean": np.exp(d).mean(),
            "sampling/importance_sampling_ratio/max": np.exp(d).max(),
        },
        rel=2e-5,
    )


@pytest.mark.parametrize("metrics", [sampling_mismatch, rollout_correction])
def test_micro_batches_change_no_metric(metrics, ragged):
    e, logprobs = random_case(ragged, 5)
    whole = {name: metric.value() for name, metric in metrics(logprobs, e).items()}
    tally = Tally()
    index = torch.arange(8)
    for batch, part in zip(split_for_updates(e, [index], 8), index.chunk(8), strict=True):
        tally.add(metrics(logprobs[part][:, : batch.mask_BS.shape[1]], batch))
    assert tally.flush() == pytest.approx(whole, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("metrics", [sampling_mismatch, rollout_correction])
def test_masked_tokens_and_empty_batches(metrics, ragged):
    e, logprobs = random_case(ragged, 2)
    junk = logprobs.masked_fill(~e.mask_BS, -1e4)
    assert metrics(junk, e) == metrics(logprobs, e)
    nothing = replace(e, mask_BS=torch.zeros_like(e.mask_BS))
    assert {m.value() for m in metrics(logprobs, nothing).values()} == {0.0}
