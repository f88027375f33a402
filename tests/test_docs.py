"""docs/metrics.md: each metric of a run with every option on is in its tables, and no other."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grpo_parts import data_of, module_of

from callbacks.adaptive_quantization_noise import AdaptiveQuantizationNoise
from callbacks.forward_quantization import ForwardQuantization
from callbacks.fp16 import FP16
from callbacks.gradient_noise_scale import GradientNoiseScale
from callbacks.held_out_evaluation import HeldOutEvaluation
from callbacks.nonfinite_guard import NonfiniteGuard
from callbacks.quantization_monitor import QuantizationMonitor
from callbacks.rejection_sampling import RejectionSampling
from callbacks.router_replay import RouterReplay
from callbacks.score_centering import ScoreCentering
from callbacks.truncated_importance_sampling import TruncatedImportanceSampling
from callbacks.update_size import UpdateSize
from callbacks.vcpo import VCPO
from lightning_qrl.kl import KLPenalty
from lightning_qrl.overlong import Overlong
from lightning_qrl.plugins import load_plugin, plugin_names
from lightning_qrl.reference import Reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


def documented():
    """Names in the first cells of the tables of metrics, in order."""
    tables = re.findall(r"^\| metric \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()]
    assert cells
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture
def logged(train, fit, recorder, tiny_policy, moe_policy, parity, ragged):
    """Names of all that a run with every option on logs, and of what any loss adds to it."""
    train(
        3,
        AdaptiveQuantizationNoise(stages=3),
        ForwardQuantization("nvfp4", where="mlp"),
        FP16("attention", initial_scale=16.0),
        GradientNoiseScale(),
        HeldOutEvaluation(2, 1, [1, 2]),
        NonfiniteGuard("skip"),
        QuantizationMonitor(1),
        RejectionSampling(),
        ScoreCentering(8),
        TruncatedImportanceSampling(),
        UpdateSize(),
        VCPO(),
        micro_batches=2,
        options={
            "kl": KLPenalty(kl_coef=0.1),
            "reference": Reference(tiny_policy),
            "overlong": Overlong(overlong_buffer=2),
        },
    )
    module, data = module_of(moe_policy, parity), data_of(parity)
    fit(module, data, 1, callbacks=[RouterReplay()], logger=recorder)
    names = {name for _, metrics in recorder.records for name in metrics} - {"epoch"}
    batch = ragged(0)
    batch = replace(batch, reference_BS=torch.zeros_like(batch.logprobs_BS))
    for loss in plugin_names("lightning_qrl.losses"):
        _, metrics = load_plugin("lightning_qrl.losses", loss)()(batch.logprobs_BS, batch)
        names |= {f"train/{name}" for name in metrics}
    names = {re.sub(r"/lag_\d+(_\d+)?$", "/lag_K", name) for name in names}
    return {re.sub(r"pass_at_\d+", "pass_at_K", name) for name in names}


def test_the_page_has_every_metric_of_a_run_and_no_other(logged):
    names = documented()
    assert len(names) == len(set(names)), "a metric is in two rows"
    assert sorted(logged - set(names)) == [], "these are not in docs/metrics.md"
    assert sorted(set(names) - logged) == [], "these are in docs/metrics.md, and no run logs them"
    # a name that is a folder too breaks file stores
    assert [a for a in logged for b in logged if b.startswith(f"{a}/")] == []
