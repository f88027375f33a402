"""Score centering in a run: what the sampler tells, and when; what a recipe may not ask."""

import lightning as L
import pytest
import torch
from grpo_parts import data_of, module_of

from callbacks.held_out_evaluation import HeldOutEvaluation
from callbacks.score_centering import ScoreCentering
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.launch import rehearse
from lightning_qrl.losses.reinforce import Reinforce
from lightning_qrl.recipe import load_recipe
from lightning_qrl.rollouts.embedded import Embedded


class Gradients(L.Callback):
    """Keeps the gradient of the first step."""

    first = None

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
        self.first = torch.cat(grads).clone() if self.first is None else self.first


class Asked(Embedded):
    """Keeps how large a head was asked for, each time."""

    def generate(self, prompts, **given):
        self.__dict__.setdefault("heads", []).append(self.head)
        return super().generate(prompts, **given)


@pytest.mark.parametrize("options", [{}, {"loss": Reinforce()}])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_where_sampler_and_trainer_are_one_the_gradient_stays(train, options, micro_batches):
    plain, centered = Gradients(), Gradients()
    train(1, plain, options=options, micro_batches=micro_batches)
    train(1, centered, ScoreCentering(8), options=options, micro_batches=micro_batches)
    assert plain.first.abs().max() > 1e-3
    atol = 1e-5 * float(plain.first.abs().max())
    torch.testing.assert_close(centered.first, plain.first, rtol=0, atol=atol)


def test_metrics_of_a_run(train, recorder):
    train(2, ScoreCentering(8))
    for metrics in recorder.steps:
        assert 0.5 < metrics["rollout_corr/head_mass"] < 1
        assert metrics["rollout_corr/score_drift"] < 1e-5


def test_rollouts_tell_a_head_and_evaluations_none(tiny_policy, parity, fit):
    module = module_of(tiny_policy, parity)
    module.engine = Asked(eos_id=tiny_policy.eos_id, pad_id=tiny_policy.pad_id, max_new_tokens=6)
    fit(module, data_of(parity), 2, callbacks=[ScoreCentering(5), HeldOutEvaluation(2, 1)])
    assert module.engine.heads == [
        5,
        0,
        0,
        5,
        0,
    ]  # the first rollout is before the first evaluation
    assert {rollout.head_ids_BSK.shape[-1] for rollout in module.rollouts} == {5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.top_p=0.9", "score_centering needs the whole distribution"),
        ("grpo.minibatches=2", "score_centering: from the second update"),
        ("grpo.loss=gspo", "score_centering: loss gspo has one value for a completion"),
    ],
)
def test_what_does_not_fit_is_refused_when_the_recipe_is_read(override, message):
    recipe = load_recipe("base", ["callbacks.score_centering={}", override])
    with pytest.raises(UserError, match=message):
        rehearse(build(recipe))


def test_it_goes_with_a_recipe():
    rehearse(build(load_recipe("base", ["callbacks.score_centering={head: 32}"])))
