"""From a recipe's section ``grpo`` to module and data: each key goes to the part that has it.

The section is flat, for the person who writes it; the parts (advantages, overlong completions, the
KL penalty, the module, the data) each take the keys that their constructors name.
"""

from collections.abc import Mapping
from typing import Any

from lightning_qrl.advantages import AdvantageEstimator
from lightning_qrl.arguments import check_arguments, make, parameters
from lightning_qrl.asynchrony.schedule import check_reach
from lightning_qrl.asynchrony.settings import KEYS, Asynchrony
from lightning_qrl.data import RolloutData
from lightning_qrl.errors import UserError
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.kl import KLPenalty
from lightning_qrl.losses.base import Loss
from lightning_qrl.overlong import Overlong
from lightning_qrl.plugins import load_plugin, nearest, plugin_names
from lightning_qrl.policy import Policy
from lightning_qrl.recipe import Recipe
from lightning_qrl.reference import Reference

CLIP = ("clip_low", "clip_high")  # options of a loss that may stand in the section itself
LOSSES = "lightning_qrl.losses"
ABOUT_REWARDS = {  # what acts on rewards, and the values that ask for nothing
    "baseline": "mean",
    "scale_rewards": "group",
    "overlong_buffer": 0,
    "dynamic_sampling": 0,
    "leverage": 1,
}


def build_grpo(
    recipe: Recipe, parts: dict[str, Any], trainer_args: Mapping[str, Any]
) -> tuple[GRPOModule, RolloutData]:
    """The module and the data that the section ``grpo`` describes.

    Args:
        recipe: the recipe.
        parts: policy, task, engine and optimizer, built.
        trainer_args: arguments of Lightning's Trainer.

    Raises:
        UserError: the section is wrong; one line that names file and key.
    """
    given = dict(recipe.values["grpo"])
    seed = {"seed": recipe.values.get("seed", 0)}
    loss = _make_loss(recipe, given)
    _refuse_idle(recipe, given, loss)
    source = given.pop("reference", None)
    targets = (GRPOModule, RolloutData, AdvantageEstimator, Overlong, KLPenalty)
    injected = (*parts, *seed, "loss", "advantages", "overlong", "kl", "reference", "prompts",
                "micro_batches", "asynchrony")  # fmt: skip
    own = {target: parameters(target, injected) for target in targets}
    own[RolloutData].remove("group_size")  # it is the module's
    known = sorted({"loss", "reference"}.union(*own.values()))
    for key in given:
        if key not in known:
            raise recipe.error(f"grpo.{key}", f"no such key; {nearest(key, known)}")
    args = {target: {k: v for k, v in given.items() if k in own[target]} for target in targets}
    advantages, overlong, kl = (make(recipe, "grpo", t, args[t]) for t in targets[2:])
    how = {"loss": loss, "advantages": advantages, "overlong": overlong, "kl": kl}
    how["reference"] = _make_reference(recipe, source, parts["policy"], loss, kl, given)
    module = make(recipe, "grpo", GRPOModule, args[GRPOModule], parts | seed | how)
    extra = {
        "prompts": parts["task"].prompts("train"),
        "group_size": module.group_size,
        "micro_batches": trainer_args.get("accumulate_grad_batches", 1),
        "asynchrony": make_asynchrony(recipe),
    }
    data = make(recipe, "grpo", RolloutData, args[RolloutData], extra | seed)
    reach = {
        "asynchrony": data.asynchrony,
        "groups": data.prompts_per_rollout,
        "updates": data.updates_per_rollout,
    }
    make(recipe, "rollout", check_reach, {}, reach)
    return module, data


def make_asynchrony(recipe: Recipe) -> Asynchrony:
    """The keys of the section ``rollout`` that are not the engine's."""
    given = {key: value for key, value in recipe.values["rollout"].items() if key in KEYS}
    made: Asynchrony = make(recipe, "rollout", Asynchrony, given)
    return made


def _refuse_idle(recipe: Recipe, given: Mapping[str, Any], loss: Loss) -> None:
    """Refuse what would do nothing, or do harm unseen."""
    for key, needed in {"overlong_penalty": "overlong_buffer", "kl_estimator": "kl_coef"}.items():
        if key in given and not given.get(needed):
            raise recipe.error(f"grpo.{key}", f"it does nothing without grpo.{needed}")
    for key, idle in ABOUT_REWARDS.items():
        if not loss.learns_from_rewards and given.get(key, idle) != idle:
            name = type(loss).__name__.lower()
            message = f"loss {name} does not learn from rewards; take {key} out"
            raise recipe.error(f"grpo.{key}", message)
    if recipe.values.get("rollout", {}).get("top_k") == 1:
        message = "all completions of a prompt would be the same; give 0 (off) or at least 2"
        raise recipe.error("rollout.top_k", message)


def _make_loss(recipe: Recipe, given: dict[str, Any]) -> Loss:
    """Take the loss and its options out of the section: a name, or a mapping with its options."""
    says = given.pop("loss", "dapo")
    options = dict(says) if isinstance(says, dict) else {"name": says}
    name = options.pop("name", None)
    if not isinstance(name, str):
        known = ", ".join(plugin_names(LOSSES))
        raise recipe.error("grpo.loss", f"give the name of a loss, one of {known}, got {says!r}")
    try:
        target = load_plugin(LOSSES, name)
    except ValueError as error:
        raise recipe.error("grpo.loss", str(error)) from None
    check_arguments(recipe, "grpo.loss", options, target)
    own, clip = parameters(target), {}
    for key in CLIP:
        value = given.pop(key, None)
        if value is not None and key not in own:
            takes = f"takes {', '.join(own)}" if own else "takes none"
            raise recipe.error(f"grpo.{key}", f"loss {name} has no such option; it {takes}")
        if value is not None and key in options:
            raise recipe.error(f"grpo.{key}", f"grpo.loss gives {key} too; take one of them out")
        if value is not None:
            clip[key] = value
    loss: Loss = make(recipe, "grpo" if clip else "grpo.loss", target, options | clip)
    return loss


def _make_reference(
    recipe: Recipe, source: Any, policy: Policy, loss: Loss, kl: KLPenalty, given: dict[str, Any]
) -> Reference | None:
    """The reference that a recipe names; for a KL penalty, by default the policy it starts from."""
    if source is None and not kl.kl_coef:
        return None
    if source is None and loss.needs_reference:
        raise recipe.error("grpo.loss", "it needs a teacher; set grpo.reference to a policy")
    if source is None and policy.init == "random":
        raise recipe.error(
            "grpo.kl_coef", "a policy that begins with random weights is no reference; set "
            "grpo.reference to a policy"
        )  # fmt: skip
    if not isinstance(source, str | None):
        raise recipe.error("grpo.reference", f"expected the name of a policy, got {source!r}")
    try:
        named = Policy(policy.name if source is None else source)
        reference = Reference(named, shared_prefix=given.get("shared_prefix", True))
        reference.check_tokens(policy)
    except UserError as error:
        raise recipe.error("grpo.reference", str(error)) from None
    return reference
