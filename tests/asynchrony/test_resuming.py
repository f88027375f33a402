"""Going on from a checkpoint: what waits in its queue must be what the run would have sampled."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.router_replay import RouterReplay
from callbacks.score_centering import ScoreCentering
from lightning_qrl.asynchrony.settings import Asynchrony
from lightning_qrl.build import build
from lightning_qrl.errors import UserError
from lightning_qrl.launch.origin import check_origin, find_origin
from lightning_qrl.recipe import load_recipe
from tests.helpers.grpo_parts import data_of, module_of

SMALL = ["grpo.prompts_per_rollout=2", "grpo.group_size=2", "trainer.max_steps=2"]
CENTER = "callbacks.score_centering.head=4"
ROUTES = "callbacks.router_replay={}"


def recipe_of(policy, staleness, *overrides):
    given = [f"policy.name={policy.name}", f"rollout.max_staleness={staleness}", *SMALL]
    return load_recipe("base", [*given, *overrides])


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def origin_of(tiny_policy, fit, made, tmp_path):
    """The checkpoint that a run of two steps leaves; each is made once."""

    def make(staleness, *overrides):
        if (staleness, overrides) in made:
            return made[staleness, overrides]
        recipe = recipe_of(tiny_policy, staleness, *overrides)
        run = build(recipe)
        given = {"recipe": recipe.to_yaml(), "recipe_name": "x", "run_id": "y"}
        run.module.provenance = given
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_on_train_epoch_end=True)
        curing = [c for key, c in run.callbacks.items() if key == "score_centering"]
        fit(run.module, run.data, 2, callbacks=[saver, *curing], enable_checkpointing=True)
        made[staleness, overrides] = origin = find_origin(str(tmp_path / "step=2.ckpt"), None)
        return origin

    return make


MORE = "trainer.max_steps=4"
CHANGES = [
    (2, [], 3, [], "max_staleness=2, now it is 3"),
    (2, [], 0, [], "max_staleness=2, now it is 0"),
    (0, [], 2, [], "max_staleness=0, now it is 2"),
    (2, [], 2, [CENTER], "score_centering.head=0, now it is 4"),
    (2, [CENTER], 2, [], "score_centering.head=4, now it is 0"),
    (2, [CENTER], 2, ["callbacks.score_centering.head=5"], "score_centering.head=4, now it is 5"),
    (2, [], 2, [ROUTES], "router_replay=False, now it is True"),
    (2, [], 2, ["rollout.max_new_tokens=9"], "max_new_tokens=8, now it is 9"),
]


@pytest.mark.parametrize(("filled", "of", "now", "given", "says"), CHANGES)
def test_a_changed_run_is_refused_when_its_checkpoint_is_examined(
    origin_of, tiny_policy, filled, of, now, given, says
):
    origin = origin_of(filled, *of)
    changed = build(recipe_of(tiny_policy, now, *given, MORE))
    with pytest.raises(UserError, match=f"the checkpoint's queue was filled with {says}; resume"):
        check_origin(origin, changed, 1)


def test_what_is_refused_or_not_beside_that(origin_of, tiny_policy):
    origin = origin_of(2, CENTER)
    again = build(recipe_of(tiny_policy, 2, CENTER, MORE))
    check_origin(origin, again, 1)
    with pytest.raises(UserError, match="has the queues of 1 ranks, and there are 2"):
        check_origin(origin, again, 2)
    check_origin(origin, build(recipe_of(tiny_policy, 2)), 1)  # at its end already: none is taken


def test_a_synchronous_run_goes_on_under_any_stack(origin_of, tiny_policy):
    origin = origin_of(0)
    check_origin(origin, build(recipe_of(tiny_policy, 0, CENTER, ROUTES, MORE)), 1)


@pytest.mark.parametrize(
    ("staleness", "callbacks", "policy", "says"),
    [
        ((2, 2), [lambda: ScoreCentering(4)], "tiny_policy", "score_centering.head=0, now it is 4"),
        ((2, 2), [RouterReplay], "moe_policy", "router_replay=False, now it is True"),
        ((2, 0), [], "tiny_policy", "max_staleness=2, now it is 0"),
        ((0, 2), [], "tiny_policy", "max_staleness=0, now it is 2"),
    ],
)
def test_so_it_is_where_lightning_resumes_without_the_launch(
    request, parity, fit, tmp_path, staleness, callbacks, policy, says
):
    def train(behind, steps, *given, **settings):
        module = module_of(request.getfixturevalue(policy), parity)
        data = data_of(parity, asynchrony=Asynchrony(max_staleness=behind))
        fit(module, data, steps, callbacks=list(given), **settings)

    saver = ModelCheckpoint(tmp_path, filename="{step}", save_on_train_epoch_end=True)
    train(staleness[0], 2, saver, enable_checkpointing=True)
    assert ("RolloutData" in torch.load(tmp_path / "step=2.ckpt")) == (staleness[0] > 0)
    with pytest.raises(UserError, match=says):
        train(staleness[1], 4, *(make() for make in callbacks), ckpt_path=tmp_path / "step=2.ckpt")
