"""Measuring which layers of a recipe's policy cost most when they are quantized.

The policy is loaded once. Its linear layers compute in BF16 or as the recipe says, and which of
them does what is changed between two measurements by committing another plan to the same model.
Completions are sampled once, with all of them in BF16, and scored by each variant in evaluation
mode: |Δ| is against BF16 on every layer that the recipe quantizes.

Where training and sampling differ, a layer is quantized as in sampling, unless that leaves it
alone. What the recipe does not quantize, be it kept or never asked for, is no candidate: leaving
out the callback that keeps it makes it one.

B completions, S predicted tokens.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_qrl.analysis.sensitivity import Layers, Measure, Sensitivity
from lightning_qrl.build import Run, build
from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience, make_experience
from lightning_qrl.launch import rehearse
from lightning_qrl.logprobs import token_logprobs
from lightning_qrl.precision import LinearPrecision, PrecisionPlan, Row
from lightning_qrl.precision.groups import Group, find_groups
from lightning_qrl.precision.resolve import BF16
from lightning_qrl.precision.select import find_linears
from lightning_qrl.recipe import Recipe
from lightning_qrl.rollouts.embedded import evaluating
from lightning_qrl.seeding import derive_seed
from lightning_qrl.tasks.base import Prompt

BATCH = 64  # completions that are scored at one time
BY = "sensitivity"
KEPT_BITS = 16.0
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def prepare(recipe: Recipe, completions: int) -> tuple[Sensitivity, list[Group]]:
    """Load a recipe's policy, sample from it, and make its layer groups ready to be measured.

    Args:
        recipe: says the policy, the task, the formats and the seed.
        completions: how many to sample, at least 2.

    Raises:
        UserError: the recipe quantizes nothing, or nothing that could be told apart.
    """
    run = build(recipe)
    rows = [row for row in rehearse(run).table() if row.quantized]
    if not rows:
        raise UserError(f"recipe {recipe.name} quantizes no layer below 16 bits: nothing to rank")
    groups = find_groups(find_linears(run.module.policy.skeleton()), {row.layer for row in rows})
    if not groups:
        raise UserError(f"recipe {recipe.name} quantizes {rows[0].layer} alone: nothing to rank")
    variants = Variants(run, rows)
    experience = variants.sample(completions, recipe.values.get("seed", 0))
    quantized, extra = {}, {}
    for row in rows:
        weight = _precision(row).weight
        bits = KEPT_BITS if weight is None else weight.bits
        quantized[row.layer] = math.prod(row.shape) * bits / 8
        extra[row.layer] = math.prod(row.shape) * (KEPT_BITS - bits) / 8
    sensitivity = Sensitivity(
        variants.measure(experience),
        experience.mask_BS.sum(dim=1),
        {group.name: group.layers for group in groups},
        quantized,
        extra,
    )
    return sensitivity, groups


class Variants:
    """One policy, any of whose layers can be quantized.

    Args:
        run: what a recipe builds.
        rows: the layers that it quantizes.
    """

    def __init__(self, run: Run, rows: list[Row]) -> None:
        self._module = run.module
        self._precision = {row.layer: _precision(row) for row in rows}
        self._autocast = AUTOCAST.get(run.trainer_args.get("precision", "32-true"))
        accelerator = run.trainer_args.get("accelerator", "auto")
        on_gpu = torch.cuda.is_available() and accelerator != "cpu"
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self.model = run.module.policy.build().to(self._device)  # type: ignore[arg-type]

    def commit(self, quantized: Layers) -> PrecisionPlan:
        """Quantize these layers and let the others compute in BF16."""
        plan = PrecisionPlan()
        for layer, own in self._precision.items():
            chosen = own if layer in quantized else BF16
            forward = {name: getattr(chosen, name) for name in ("weight", "activation", "backend")}
            plan.quantize(layer, by=BY, **forward)
        plan.commit(self.model)
        return plan

    def sample(self, completions: int, seed: int) -> Experience:
        """Completions of the policy with every layer in BF16, of prompts all over the split."""
        prompts = _spread(self._module.task.prompts("train"), completions)
        ids = [self._module.policy.encode(prompt.text) for prompt in prompts]
        engine = self._module.engine
        plan = self.commit(frozenset())
        engine.sync(self.model, 0)
        with plan.sampling(), self._casting():
            samples = math.ceil(completions / len(prompts))
            made = engine.generate(ids, samples=samples, seed=derive_seed(seed, BY))[:completions]
        none_B = torch.zeros(len(made))
        return make_experience(made, none_B, none_B, self._module.policy.pad_id).to(self._device)

    def measure(self, experience: Experience) -> Measure:
        """Summed |Δlogprob| of each completion, as a function of the quantized layers."""
        reference_BS = self._logprobs(experience, frozenset())

        def measure(quantized: Layers) -> Tensor:
            change_BS = (self._logprobs(experience, quantized) - reference_BS).abs()
            return change_BS.where(experience.mask_BS, 0).double().sum(dim=1).cpu()

        return measure

    @torch.no_grad()
    def _logprobs(self, experience: Experience, quantized: Layers) -> Tensor:
        plan = self.commit(quantized)
        parts = []
        with evaluating(self.model), plan.sampling(), self._casting():
            for ids_bT in torch.split(experience.input_ids_BT, BATCH):
                logits_bSV = self.model(input_ids=ids_bT[:, :-1], use_cache=False).logits
                temperature = self._module.engine.temperature
                parts.append(token_logprobs(logits_bSV, ids_bT[:, 1:], temperature)[0])
        return torch.cat(parts)

    def _casting(self) -> AbstractContextManager[None]:
        enabled = self._autocast is not None
        return torch.autocast(self._device.type, dtype=self._autocast, enabled=enabled)


def _precision(row: Row) -> LinearPrecision:
    """What the sampler quantizes a layer to; what the trainer does where the sampler does not."""
    sides = [side for side in (row.rollout, row.train) if side is not None and side.quantized]
    return sides[0]


def _spread(prompts: Sequence[Prompt], count: int) -> Sequence[Prompt]:
    """At most `count` prompts, evenly spaced."""
    return prompts[:: max(1, len(prompts) // count)][:count]
