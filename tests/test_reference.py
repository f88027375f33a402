"""The reference policy: its numbers are plain scoring, and it is no part of what is trained."""

import copy
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import models

from callbacks.forward_quantization import ForwardQuantization
from lightning_qrl import scoring
from lightning_qrl.data import RolloutData
from lightning_qrl.errors import UserError
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.kl import KLPenalty
from lightning_qrl.losses.distill import Distill
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.reference import Reference
from lightning_qrl.rollouts.embedded import Embedded

CPU = torch.device("cpu")
G, P = 4, 3


@pytest.fixture(scope="module")
def teacher(save_policy, tmp_path_factory):
    """A policy of the same tokens and other weights."""
    folder = tmp_path_factory.mktemp("teacher")
    save_policy(folder, initializer_range=0.2)
    return Policy(str(folder))


def alone(policy, e, temperature):
    """Float64 log-probabilities of each row by itself."""
    model, rows = policy.build().double(), torch.zeros(e.mask_BS.shape, dtype=torch.float64)
    with torch.no_grad():
        for b in range(len(e)):
            scores = model(input_ids=e.input_ids_BT[b : b + 1, :-1]).logits[0] / temperature
            chosen = scores.log_softmax(-1).gather(-1, e.input_ids_BT[b, 1:, None])[:, 0]
            rows[b] = chosen.masked_fill(~e.mask_BS[b], 0.0)
    return rows


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_log_probabilities_are_those_of_each_completion_alone(
    temperature, shared_prefix, teacher, ragged, monkeypatch
):
    monkeypatch.setattr(scoring, "ROWS", 3)  # 8 completions: the last part is shorter
    e = ragged(0)
    scored = Reference(teacher, shared_prefix=shared_prefix).score(e, temperature, CPU)
    assert scored.reference_BS.dtype == torch.float32
    assert not scored.reference_BS.requires_grad
    assert not scored.reference_BS[~e.mask_BS].any()
    want_BS = alone(teacher, e, temperature)
    torch.testing.assert_close(scored.reference_BS.double(), want_BS, rtol=0, atol=1e-5)
    same = replace(scored, reference_BS=None)
    for a, b in zip(same._tensors().values(), e._tensors().values(), strict=True):
        assert torch.equal(a, b)


def test_weights_are_loaded_once_and_only_when_needed(teacher, ragged, monkeypatch):
    policy, builds = Policy(teacher.name), []
    build = policy.build
    monkeypatch.setattr(policy, "build", lambda: builds.append(1) or build())
    reference = Reference(policy)
    reference.check_tokens(teacher)
    assert builds == []
    first = reference.score(ragged(0), 1.0, CPU)
    again = reference.score(ragged(0), 1.0, CPU)
    assert builds == [1]
    assert torch.equal(first.reference_BS, again.reference_BS)


def test_a_batch_without_a_token_is_scored(teacher, ragged):
    e = ragged(0)
    e = e.where(torch.zeros(len(e), dtype=torch.bool))
    assert not Reference(teacher).score(e, 1.0, CPU).reference_BS.any()


def test_other_tokens_are_refused(teacher, save_policy, tmp_path):
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"=*-+9876543210"])}
    save_policy(tmp_path, models.WordLevel(vocab=vocab, unk_token="<unk>"))  # as many, reordered
    other = Policy(str(tmp_path))
    with pytest.raises(UserError) as said:
        Reference(other).check_tokens(teacher)
    message = str(said.value)
    assert message.startswith(f"reference {other.name} has other tokens than policy {teacher.name}")
    assert "\n" not in message


# ---- in training ---------------------------------------------------------------------------------


def train(policy, parity, fit, steps, reference, folder=None, callbacks=(), **options):
    module = GRPOModule(
        policy=policy,
        task=parity,
        engine=Embedded(eos_id=policy.eos_id, pad_id=policy.pad_id, max_new_tokens=6),
        optimizer=AdamWSettings(lr=1e-2),
        group_size=G,
        reference=reference,
        **options,
    )
    data = RolloutData(parity.prompts("train"), group_size=G, prompts_per_rollout=P)
    saver = []
    if folder is not None:
        saver = [ModelCheckpoint(folder, filename="end", save_weights_only=False)]
    trainer = fit(
        module, data, steps, callbacks=[*callbacks, *saver], enable_checkpointing=bool(saver)
    )
    return module, trainer


def test_it_is_neither_trained_nor_saved(tiny_policy, teacher, parity, fit, tmp_path):
    reference = Reference(teacher)
    module, trainer = train(
        tiny_policy, parity, fit, 2, reference, tmp_path, kl=KLPenalty(kl_coef=0.1)
    )
    frozen = reference._scorer._model
    before = teacher.build().state_dict()
    assert all(torch.equal(frozen.state_dict()[name], before[name]) for name in before)
    assert not any(p.requires_grad or p.grad is not None for p in frozen.parameters())
    assert not frozen.training
    optimized = {id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]}
    assert optimized == {id(p) for p in module.model.parameters()}
    assert optimized.isdisjoint(id(p) for p in frozen.parameters())
    want = {f"model.{name}" for name in tiny_policy.build().state_dict()}
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == set(module.state_dict()) == want


def test_the_reference_is_not_quantized(tiny_policy, teacher, parity, fit, recorder):
    stack = [ForwardQuantization("nvfp4", outer_scale="row")]
    reference = Reference(teacher)
    train(tiny_policy, parity, fit, 1, reference, callbacks=stack, loss=Distill())
    kinds = {type(m).__name__ for m in reference._scorer._model.modules()}
    assert "Linear" in kinds
    assert "QuantLinear" not in kinds


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_policy_starts_at_no_distance_from_its_own_reference(
    precision, tiny_policy, parity, fit, recorder
):
    module = GRPOModule(
        policy=tiny_policy,
        task=parity,
        engine=Embedded(
            eos_id=tiny_policy.eos_id, pad_id=tiny_policy.pad_id, temperature=1.3, max_new_tokens=6
        ),
        optimizer=AdamWSettings(lr=1e-2),
        group_size=G,
        kl=KLPenalty(kl_coef=0.1),
        reference=Reference(tiny_policy),
    )
    data = RolloutData(parity.prompts("train"), group_size=G, prompts_per_rollout=P)
    fit(module, data, 3, logger=recorder, precision=precision)
    kl = [step["train/kl"] for step in recorder.steps]
    assert abs(kl[0]) < (1e-9 if precision == "32-true" else 1e-5)
    assert kl[2] > 100 * max(abs(kl[0]), 1e-6)


def test_the_penalty_pulls_a_policy_to_its_reference(tiny_policy, teacher, parity, fit, recorder):
    parity.reward = lambda prompt, completion: 0.5  # nothing else to learn
    module = GRPOModule(
        policy=tiny_policy,
        task=parity,
        engine=Embedded(eos_id=tiny_policy.eos_id, pad_id=tiny_policy.pad_id, max_new_tokens=6),
        optimizer=AdamWSettings(lr=3e-3),
        group_size=16,
        kl=KLPenalty(kl_coef=1.0, kl_estimator="k2"),
        reference=Reference(teacher),
    )
    data = RolloutData(parity.prompts("train"), group_size=16, prompts_per_rollout=7)
    start = copy.deepcopy(tiny_policy.build().state_dict())
    fit(module, data, 12, logger=recorder)
    kl = [step["train/kl"] for step in recorder.steps]
    assert kl[-1] < 0.8 * kl[0]
    assert any(not torch.equal(v, start[n]) for n, v in module.model.state_dict().items())
