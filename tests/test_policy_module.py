"""What every training module shares: weight decay by the plan, and the noise of rounding."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.forward_quantization import ForwardQuantization
from callbacks.no_decay_on_quantized import NoDecayOnQuantized
from callbacks.quantized_backward import QuantizedBackward
from lightning_qrl.data import RolloutData
from lightning_qrl.formats.rounding import default_generator
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.rollouts.embedded import Embedded


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_head_does_not_decay_also_where_it_goes_by_the_embeddings_name(
    tied, tmp_path, save_policy, parity, fit
):
    save_policy(tmp_path, tie_word_embeddings=tied)
    policy = Policy(str(tmp_path))
    module = GRPOModule(
        policy=policy,
        task=parity,
        engine=Embedded(eos_id=policy.eos_id, pad_id=policy.pad_id),
        optimizer=AdamWSettings(weight_decay=0.1),
        group_size=2,
    )
    data = RolloutData(parity.prompts("train"), group_size=2, prompts_per_rollout=2)
    stack = [ForwardQuantization("nvfp4", where=["linears", "lm_head"]), NoDecayOnQuantized()]
    trainer = fit(module, data, steps=1, callbacks=stack)
    decaying, exempt = (set(g["param_names"]) for g in trainer.optimizers[0].param_groups)
    assert decaying == (set() if tied else {"model.embed_tokens.weight"})
    assert ("model.embed_tokens.weight" if tied else "lm_head.weight") in exempt


# --- stochastic rounding ----------------------------------------------------------------------


def pretraining(rounding="stochastic"):
    """The stack of recipes/nvfp4_pretraining.yaml, but for the layers that it keeps."""
    return [
        ForwardQuantization("nvfp4", weight={"block": [16, 16]}),
        QuantizedBackward("nvfp4", rounding=rounding, hadamard=16),
    ]


def rounded_everywhere():
    """Noise in sampling and in all three GEMMs of training."""
    return [
        ForwardQuantization("nvfp4", rounding="stochastic"),
        QuantizedBackward("nvfp4", rounding="stochastic"),
    ]


@pytest.fixture
def train(tiny_policy, parity, fit):
    """Trains the tiny policy for some steps, two updates a rollout; gives its weights."""

    def run(stack, steps, seed=0, parts=1, **settings):
        engine = Embedded(eos_id=tiny_policy.eos_id, pad_id=tiny_policy.pad_id, max_new_tokens=4)
        module = GRPOModule(
            policy=tiny_policy,
            task=parity,
            engine=engine,
            optimizer=AdamWSettings(lr=1e-2),
            group_size=4,
            seed=seed,
        )
        data = RolloutData(
            parity.prompts("train"),
            group_size=4,
            prompts_per_rollout=4,
            minibatches=2,
            micro_batches=parts,
        )
        fit(module, data, steps, callbacks=stack, accumulate_grad_batches=parts, **settings)
        return {name: tensor.clone() for name, tensor in module.model.state_dict().items()}

    return run


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def differ(a, b):
    return any(not torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stack", [pretraining, rounded_everywhere])
@pytest.mark.parametrize("parts", [1, 2])
def test_stochastic_rounding_is_decided_by_the_seed_alone(train, stack, parts):
    first = train(stack(), 2, parts=parts)
    torch.manual_seed(77)  # of no matter
    default_generator(torch.device("cpu")).manual_seed(77)
    assert_same(train(stack(), 2, parts=parts), first)
    assert differ(train(stack(), 2, seed=1, parts=parts), first)


def test_the_noise_is_there(train):
    assert differ(train(pretraining(), 1), train(pretraining("nearest"), 1))


class Evaluates(L.Callback):
    """Samples held-out completions after each step."""

    def on_train_batch_end(self, trainer, module, *batch):
        module.evaluate(module.task.prompts("held_out"))


@pytest.mark.parametrize("stack", [pretraining, rounded_everywhere])
def test_evaluating_between_steps_does_not_move_the_noise_of_training(train, stack):
    assert_same(train([*stack(), Evaluates()], 3), train(stack(), 3))


@pytest.mark.parametrize("stack", [pretraining, rounded_everywhere])
@pytest.mark.parametrize("parts", [1, 2])
def test_resuming_equals_an_uninterrupted_run_under_stochastic_rounding(
    tmp_path, train, stack, parts
):
    saver = ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True
    )
    half = train([*stack(), saver], 2, enable_checkpointing=True, parts=parts)
    resumed = train(stack(), 4, ckpt_path=tmp_path / "step=2.ckpt", parts=parts)
    assert_same(resumed, train(stack(), 4, parts=parts))
    assert differ(resumed, half)
