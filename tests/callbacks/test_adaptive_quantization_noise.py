"""QeRL's noise: its schedule, what the sampler makes of it, and that nobody else ever sees it."""

import copy

import lightning as L
import pytest
import torch
from grpo_parts import data_of, module_of
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_models import SIZES
from transformers import Olmo2Config, Olmo2ForCausalLM

from callbacks.adaptive_quantization_noise import AdaptiveQuantizationNoise
from callbacks.held_out_evaluation import HeldOutEvaluation
from lightning_qrl.errors import UserError
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.precision.norms import feeding_norms
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.scoring import Scorer
from lightning_qrl.seeding import derive_seed

START, END = 2e-2, 2e-3


def noise(stages=3):
    return AdaptiveQuantizationNoise(sigma_start=START, sigma_end=END, stages=stages)


def weights_of(module):
    return {name: tensor.clone() for name, tensor in module.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Seen(Embedded):
    """Keeps the weights that it samples with."""

    def generate(self, prompts, **given):
        state = {name: t.clone() for name, t in self._model.state_dict().items()}
        self.__dict__.setdefault("states", []).append(state)
        return super().generate(prompts, **given)


class Weights(L.Callback):
    """Keeps the weights that each micro-batch meets, and those after it."""

    def __init__(self):
        self.before, self.after = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before.append(weights_of(pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append(weights_of(pl_module))


@pytest.fixture
def run(tiny_policy, parity, fit, recorder):
    """Three steps: without noise, with START, with END. The module, with all rollouts kept."""

    def make(*callbacks, steps=3, **settings):
        module = module_of(tiny_policy, parity)
        module.optimizer_settings = AdamWSettings(lr=1e-3)
        module.copies = True
        module.engine = Seen(eos_id=tiny_policy.eos_id, pad_id=tiny_policy.pad_id, max_new_tokens=6)
        fit(module, data_of(parity), steps, callbacks=list(callbacks), logger=recorder, **settings)
        return module

    return make


# --- the schedule ---------------------------------------------------------------------------------


def test_the_schedule_by_hand():
    callback = AdaptiveQuantizationNoise(sigma_start=1e-2, sigma_end=1e-4, stages=10)
    sigmas = [callback.sigma(step, 100) for step in range(100)]
    assert sigmas[:10] == [0.0] * 10
    assert sigmas[10:20] == [1e-2] * 10
    assert sigmas[50:60] == pytest.approx([1e-3] * 10)  # halfway, geometrically
    assert sigmas[90:] == pytest.approx([1e-4] * 10)
    ratios = [sigmas[at + 10] / sigmas[at] for at in range(10, 90, 10)]
    assert ratios == pytest.approx([1e-2 ** (1 / 8)] * 8)
    assert callback.sigma(105, 100) == pytest.approx(1e-4)  # a run that goes on
    short = [AdaptiveQuantizationNoise(stages=3).sigma(step, 4) for step in range(4)]
    assert short == pytest.approx([0, 0, 1e-2, 1e-4])  # stages of 4/3 steps


def test_what_is_logged(run, recorder):
    run(noise())
    assert [m["quant/aqn_sigma"] for m in recorder.steps] == pytest.approx([0, START, END])


# --- in the sampler -------------------------------------------------------------------------------


def noisy_copy(model, seed, step, sigma):
    """The policy as it was to be sampled, from the noise's own definition, in float64."""
    noisy = copy.deepcopy(model)
    draws = torch.Generator().manual_seed(derive_seed(seed, "aqn", step))
    for layer in noisy.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data += sigma * torch.randn(norm.weight.shape, generator=draws).double()
    return noisy


def test_rollouts_are_those_of_the_noisy_policy_and_training_is_not(run, recorder):
    module = run(noise())
    for step, sigma in enumerate([0.0, START, END]):
        batch, model = module.seen[step]  # model: float64, as training_step met it
        mask = batch.mask_BS
        noisy = noisy_copy(model, module.seed, step, sigma)
        noisy_BS = Scorer(noisy, shared_prefix=False)(batch, 1.0).logprobs
        assert (noisy_BS - batch.logprobs_BS)[mask].abs().max() < 3e-5
        clean_BS = Scorer(model, shared_prefix=False)(batch, 1.0).logprobs
        apart = float((batch.logprobs_BS - clean_BS.detach())[mask].abs().mean())
        logged = recorder.steps[step]["train/sampling/sampling_logp_difference/mean"]
        assert logged == pytest.approx(apart, abs=1e-5)
        assert (apart > 1e-4) == (sigma > 0)


def test_log_probabilities_move_by_what_sigma_predicts(run):
    """To first order log p moves by a normal variable of deviation sigma |d log p / d w|."""
    module = run(noise())
    batch, model = module.seen[2]
    weights = list(feeding_norms(model).values())
    logprobs = Scorer(model, shared_prefix=False)(batch, 1.0).logprobs[batch.mask_BS]
    squares = [
        sum(float(g.square().sum()) for g in torch.autograd.grad(lp, weights, retain_graph=True))
        for lp in logprobs
    ]
    predicted = END * (sum(squares) / len(squares)) ** 0.5
    moved = (batch.logprobs_BS[batch.mask_BS] - logprobs).square().mean().sqrt()
    assert 0.5 < float(moved.detach()) / predicted < 2  # measured: 1.28


def test_noise_is_one_for_a_version_of_the_weights_and_new_for_the_next(run):
    module = run(noise(), steps=3)
    clean = weights_of(module)
    sampled = []
    for _ in range(2):
        with module.rolling_out():
            sampled.append(weights_of(module))
    assert same(*sampled)
    assert not same(sampled[0], clean)
    changed = {name for name in clean if not torch.equal(clean[name], sampled[0][name])}
    assert changed == {f"{name}.weight" for name in feeding_norms(module.model)}
    first, second = (s for s in module.engine.states[1:])
    drawn = [
        state[name] - module.seen[step][1].state_dict()[name]
        for step, state in ((1, first), (2, second))
        for name in ["model.layers.0.input_layernorm.weight"]
    ]
    assert not torch.allclose(drawn[0] / START, drawn[1] / END, atol=0.1)


# --- and nowhere else -----------------------------------------------------------------------------


def test_neither_training_nor_checkpoints_nor_evaluation_see_it(run, tmp_path):
    weights, saving = Weights(), ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)
    evaluating = HeldOutEvaluation(prompts=2, every_n_steps=1)
    module = run(noise(), weights, evaluating, saving, enable_checkpointing=True)
    for after, before in zip(weights.after, weights.before[1:], strict=False):
        assert same(after, before)
    assert same(weights.after[-1], weights_of(module))
    states = module.engine.states  # the first rollout, an evaluation, then these by turns
    assert len(states) == 7
    for step in range(3):
        rollout, evaluation = (2 * step + 1, 2 * step) if step else (0, 1)
        assert same(states[evaluation], weights.before[step])
        assert same(states[rollout], weights.before[step]) == (step == 0)
    saved = sorted(tmp_path.glob("*.ckpt"))
    assert len(saved) == 3
    for path, after in zip(saved, weights.after, strict=True):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert same({n.removeprefix("model."): t for n, t in state.items()}, after)


def test_a_resumed_run_is_the_uninterrupted_one(run, tmp_path, tiny_policy, parity, fit):
    saving = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{step}")
    whole = run(noise(), saving, enable_checkpointing=True)
    resumed = module_of(tiny_policy, parity)
    resumed.optimizer_settings = AdamWSettings(lr=1e-3)
    checkpoint = tmp_path / "step=2.ckpt"
    fit(resumed, data_of(parity), 3, ckpt_path=checkpoint, callbacks=[noise()])
    assert len(resumed.rollouts) == 1
    assert torch.equal(resumed.rollouts[0].logprobs_BS, whole.rollouts[2].logprobs_BS)
    assert same(weights_of(resumed), weights_of(whole))


def test_it_is_undone_where_sampling_fails(run, monkeypatch):
    module = run(noise())
    clean = weights_of(module)

    def fail(*args, **kwargs):
        assert not same(clean, weights_of(module))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module.engine, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        module.collect(module.task.prompts("train")[:1], 9)
    assert same(clean, weights_of(module))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma_start": 1e-4, "sigma_end": 1e-2}, "the end not above the start"),
        ({"sigma_end": 0.0}, "above 0 and below 1"),
        ({"sigma_start": 1.0}, "above 0 and below 1"),
        ({"stages": 2}, "stages must be at least 3, got 2"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveQuantizationNoise(**options)


def test_a_policy_without_such_norms_is_refused(save_policy, parity, fit, tmp_path):
    save_policy(tmp_path)
    Olmo2ForCausalLM(Olmo2Config(**{**SIZES, "vocab_size": 17})).save_pretrained(tmp_path)
    module = module_of(Policy(str(tmp_path)), parity)
    with pytest.raises(UserError, match="no linear layer of Olmo2ForCausalLM reads what a norm"):
        fit(module, data_of(parity), 3, callbacks=[noise()])


@pytest.mark.parametrize("steps", [-1, 2])
def test_a_run_with_too_few_steps_for_its_stages(tiny_policy, parity, fit, steps):
    module = module_of(tiny_policy, parity)
    says = rf"trainer\.max_steps={steps} is less than its stages=3"
    with pytest.raises(UserError, match=says):
        fit(module, data_of(parity), steps, max_epochs=1, callbacks=[noise()])
