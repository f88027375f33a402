"""From a recipe to the objects of a run: check every key, then construct.

Constructors take plain keyword arguments, never the recipe. Whatever they raise becomes one line
that names the section.

A task or a callback may be a class of one's own. To import it is to run its module, whatever that
does, before it is known what the class is; so a stranger's recipe is read before it is used.
"""

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L

from lightning_qrl.arguments import check_arguments, make, make_named, naming
from lightning_qrl.asynchrony.settings import KEYS
from lightning_qrl.build_grpo import build_grpo, make_asynchrony
from lightning_qrl.errors import UserError, described, in_one_line
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.plugins import load_plugin, nearest, plugin_names
from lightning_qrl.policy import Policy
from lightning_qrl.policy_module import PolicyModule
from lightning_qrl.recipe import Recipe
from lightning_qrl.rollouts.base import RolloutEngine
from lightning_qrl.supervised import Demonstrations, SupervisedModule
from lightning_qrl.tasks.base import SPLITS, Prompt, Split, Task

CALLBACKS = "callbacks"  # the package that a callback's key is looked up in
FIXED_TRAINER = {  # what the framework needs to be as it is
    "use_distributed_sampler": False,  # a rollout is already its rank's own
    "reload_dataloaders_every_n_epochs": 1,  # an epoch is a rollout phase
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
CUTS_EPOCHS = ("barebones", "fast_dev_run", "limit_train_batches", "overfit_batches")
NO_LOOP = (  # held-out prompts are evaluated by a callback, not in Lightning's own loops
    "limit_val_batches", "limit_test_batches", "limit_predict_batches",
    "val_check_interval", "check_val_every_n_epoch",
)  # fmt: skip
NOT_THE_RECIPES = (
    "self", "logger", "callbacks", "default_root_dir", *FIXED_TRAINER, *CUTS_EPOCHS, *NO_LOOP
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a run is made of, built but not started.

    Attributes:
        module: the training module.
        data: its data.
        callbacks: by their keys in the recipe.
        trainer_args: arguments of Lightning's Trainer, without logger and callbacks.
    """

    module: PolicyModule
    data: L.LightningDataModule
    callbacks: dict[str, L.Callback]
    trainer_args: dict[str, Any]


def build(recipe: Recipe) -> Run:
    """Check a recipe to the last key and build the objects it describes; no weights are loaded.

    Raises:
        UserError: the recipe is wrong; one line that names file and key.
    """
    with in_one_line(f"recipe {recipe.name}"):
        return _build(recipe)


def _build(recipe: Recipe) -> Run:
    values = recipe.values
    policy = make(recipe, "policy", Policy, values.get("policy", {}))
    task = _make_task(recipe)
    engine = _make_engine(recipe, policy)
    settings = make(recipe, "optimizer", AdamWSettings, values.get("optimizer", {}))
    trainer_args = _trainer_args(recipe)
    parts = {"policy": policy, "task": task, "engine": engine, "optimizer": settings}
    methods = [key for key in ("grpo", "supervised") if key in values]
    if len(methods) != 1:
        raise UserError(f"recipe {recipe.name}: give one of the sections grpo and supervised")
    build_method = build_grpo if methods == ["grpo"] else _supervised
    module, data = build_method(recipe, parts, trainer_args)
    return Run(module, data, _make_callbacks(recipe), trainer_args)


def _supervised(
    recipe: Recipe, parts: dict[str, Any], trainer_args: Mapping[str, Any]
) -> tuple[SupervisedModule, Demonstrations]:
    if make_asynchrony(recipe).max_staleness:
        message = "only GRPO trains on what the policy samples; take it out"
        raise recipe.error("rollout.max_staleness", message)
    seed = {"seed": recipe.values.get("seed", 0)}
    module = make(recipe, "supervised", SupervisedModule, {}, parts | seed)
    extra = {
        "policy": parts["policy"],
        "prompts": parts["task"].prompts("train"),
        "max_steps": trainer_args["max_steps"],
    }
    given = recipe.values["supervised"]
    return module, make(recipe, "supervised", Demonstrations, given, extra | seed)


def _make_task(recipe: Recipe) -> Task:
    """The task: one of ours by its name, or an outside class by its path."""
    given = dict(recipe.values.get("task", {}))
    if "_target_" in given:
        path = f"{given.pop('_target_')}"
        found = _import(recipe, "task._target_", path)
        methods = ("prompts", "reward", "solved")
        if not (isinstance(found, type) and all(hasattr(found, name) for name in methods)):
            message = f"{path} is no task: a class with prompts(split), reward and solved"
            raise recipe.error("task._target_", message)
        task: Task = make(recipe, "task", found, given)
    else:
        task = make_named(recipe, "task", "lightning_qrl.tasks")
    for split in SPLITS:
        _check_prompts(recipe, task, split)
    return task


def _check_prompts(recipe: Recipe, task: Task, split: Split) -> None:
    try:
        prompts = task.prompts(split)
    except Exception as error:  # a task is anyone's code, and may raise anything
        reason = f"prompts({split!r}) failed: {described(error)}"
        raise recipe.error("task", reason) from error
    if not (isinstance(prompts, Sequence) and len(prompts)):
        reason = f"prompts({split!r}) must give a list of prompts, at least one; got {prompts!r}"
        raise recipe.error("task", reason[:300])
    for prompt in prompts:
        if not (isinstance(prompt, Prompt) and prompt.text):
            reason = f"prompts({split!r}) must give Prompts with a text, got {prompt!r}"
            raise recipe.error("task", reason[:300])


def _make_engine(recipe: Recipe, policy: Policy) -> RolloutEngine:
    with naming(recipe, "policy"):
        ids = {"eos_id": policy.eos_id, "pad_id": policy.pad_id}
    engine: RolloutEngine = make_named(
        recipe, "rollout", "lightning_qrl.rollouts", name_key="engine", extra=ids, others=KEYS
    )
    return engine


def _trainer_args(recipe: Recipe) -> dict[str, Any]:
    given = dict(recipe.values.get("trainer", {}))
    check_arguments(recipe, "trainer", given, L.Trainer, NOT_THE_RECIPES)
    steps = given.get("max_steps")
    if steps is None or steps < 1:
        raise recipe.error("trainer.max_steps", f"give the number of optimizer steps, got {steps}")
    if given.get("profiler") == "xla":
        raise recipe.error("trainer.profiler", "nothing here computes on XLA devices; take it out")
    parts = given.get("accumulate_grad_batches", 1)
    if parts < 1:
        raise recipe.error("trainer.accumulate_grad_batches", f"expected at least 1, got {parts}")
    clip = given.get("gradient_clip_val")
    if clip is not None and not 0 <= clip < math.inf:
        raise recipe.error(
            "trainer.gradient_clip_val", f"expected a finite number from 0, got {clip}"
        )
    return given | FIXED_TRAINER


def _make_callbacks(recipe: Recipe) -> dict[str, L.Callback]:
    made: dict[str, L.Callback] = {}
    for key, given in recipe.values["callbacks"].items():
        path = f"callbacks.{key}"
        if not isinstance(given, dict):
            raise recipe.error(path, f"expected a mapping, got {given!r}")
        args = dict(given)
        target = _callback_class(recipe, key, args.pop("_target_", None))
        callback = make(recipe, path, target, args)
        if hasattr(callback, "handle"):
            callback.handle = key
        if getattr(target, "single", False):
            for other, of_a_kind in made.items():
                if type(of_a_kind) is target:
                    message = f"callbacks.{other} is one too, and two undo or double each other"
                    raise recipe.error(path, f"{message}; take either out")
        made[key] = callback
    return made


def _callback_class(recipe: Recipe, key: str, target: Any) -> type[L.Callback]:
    if target is None:
        if key not in plugin_names(CALLBACKS):
            hint = nearest(key, plugin_names(CALLBACKS))
            message = f"no such callback; {hint}; an outside one needs _target_: package.Class"
            raise recipe.error(f"callbacks.{key}", message)
        found: Any = load_plugin(CALLBACKS, key)
    else:
        found = _import(recipe, f"callbacks.{key}._target_", target)
    if not (isinstance(found, type) and issubclass(found, L.Callback)):
        raise recipe.error(f"callbacks.{key}", f"{target} is no Lightning callback")
    return found


def _import(recipe: Recipe, path: str, target: Any) -> Any:
    module, _, name = str(target).rpartition(".")
    if module.partition(".")[0] in sys.stdlib_module_names:  # some do things when imported
        raise recipe.error(path, f"{target} is of Python's own library, which has no such class")
    if "" not in sys.path:
        sys.path.append("")  # a class of one's own may lie in the working directory
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module is anyone's code, and may do anything
        raise recipe.error(path, f"cannot import {target!r}: {described(error)}") from None
