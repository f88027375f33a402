"""What a rollout is: completions as sampled, and the batch that the loss is computed on.

Token ids are those that were sampled. Nothing here is ever decoded and encoded again: another
tokenization of the same text would train tokens that the policy never chose.

B completions, T tokens of prompt and completion, S = T - 1 predicted tokens, N new tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion.

    Attributes:
        prompt_ids: token ids of the prompt.
        token_ids_N: int64 [N], sampled ids, the end-of-sequence token included if it was sampled.
        logprobs_N: float32 [N], log-probabilities under the distribution they were sampled from.
        versions_N: int64 [N], weight version (optimizer steps taken) that sampled each token.
        truncated: whether it ran into the length limit before an end-of-sequence token.
    """

    prompt_ids: tuple[int, ...]
    token_ids_N: Tensor
    logprobs_N: Tensor
    versions_N: Tensor
    truncated: bool


@dataclass(frozen=True, slots=True)
class Experience:
    """A batch of completions with their advantages, right-padded.

    Fields that end in S are aligned with the predictions: entry s belongs to token s + 1.

    Attributes:
        input_ids_BT: int64 [B, T], prompt, completion, padding.
        mask_BS: bool [B, S], true where the predicted token was sampled (from lengths, never from
            token values: padding may equal the end-of-sequence token).
        logprobs_BS: float32 [B, S], the sampler's log-probabilities, 0 outside the mask.
        versions_BS: int64 [B, S], weight version of each sampled token, 0 outside the mask.
        rewards_B: float32 [B].
        advantages_B: float32 [B].
        truncated_B: bool [B].
        step_tokens: sampled tokens in the whole optimizer step that this batch is a part of, over
            all micro-batches and ranks: the denominator of token-level losses.
        loss_scale: what a micro-batch's loss is multiplied by so that the trainer's averaging over
            micro-batches and ranks turns back into a sum.
    """

    input_ids_BT: Tensor
    mask_BS: Tensor
    logprobs_BS: Tensor
    versions_BS: Tensor
    rewards_B: Tensor
    advantages_B: Tensor
    truncated_B: Tensor
    step_tokens: int
    loss_scale: float = 1.0

    def __len__(self) -> int:
        return len(self.input_ids_BT)

    def to(self, device: torch.device | str) -> "Experience":
        """The same batch on another device."""
        return self._with({name: t.to(device) for name, t in self._tensors().items()})

    def take(self, index: Tensor) -> "Experience":
        """The completions at ``index``; ``step_tokens`` becomes theirs.

        Columns that are padding in all of them are cut off.
        """
        rows = {name: tensor[index] for name, tensor in self._tensors().items()}
        used = rows["mask_BS"].any(dim=0).nonzero()
        width = int(used.max()) + 1 if len(used) else 1
        for name in ("mask_BS", "logprobs_BS", "versions_BS"):
            rows[name] = rows[name][:, :width]
        rows["input_ids_BT"] = rows["input_ids_BT"][:, : width + 1]
        return replace(self._with(rows), step_tokens=int(rows["mask_BS"].sum()))

    def _with(self, tensors: dict[str, Any]) -> "Experience":
        return replace(self, **tensors)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def make_experience(
    completions: Sequence[Completion], rewards_B: Tensor, advantages_B: Tensor, pad_id: int
) -> Experience:
    """Lay completions out as one right-padded batch.

    Args:
        completions: B completions of any lengths, each of at least one token.
        rewards_B: float32 [B].
        advantages_B: float32 [B].
        pad_id: token id that fills the padding.
    """
    prompts = [torch.tensor(c.prompt_ids) for c in completions]
    ids = [torch.cat([p, c.token_ids_N]) for p, c in zip(prompts, completions, strict=True)]

    def aligned(name: str) -> Tensor:
        rows = [
            torch.cat([getattr(c, name).new_zeros(len(p) - 1), getattr(c, name)])
            for p, c in zip(prompts, completions, strict=True)
        ]
        return pad_sequence(rows, batch_first=True)

    prompt_B1 = torch.tensor([len(p) for p in prompts])[:, None]
    length_B1 = torch.tensor([len(i) for i in ids])[:, None]
    input_ids_BT = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    target_S = torch.arange(1, input_ids_BT.shape[1])
    mask_BS = (target_S >= prompt_B1) & (target_S < length_B1)
    return Experience(
        input_ids_BT=input_ids_BT,
        mask_BS=mask_BS,
        logprobs_BS=aligned("logprobs_N"),
        versions_BS=aligned("versions_N"),
        rewards_B=rewards_B,
        advantages_B=advantages_B,
        truncated_B=torch.tensor([c.truncated for c in completions]),
        step_tokens=int(mask_BS.sum()),
    )


def split_for_updates(
    experience: Experience, updates: Sequence[Tensor], micro_batches: int, world_size: int = 1
) -> list[Experience]:
    """Cut a rollout into the micro-batches of its optimizer steps.

    Splitting changes no gradient: each micro-batch knows the token count of its whole step, and
    undoes the trainer's division by the number of micro-batches and of ranks.

    Args:
        experience: the rollout of this rank.
        updates: for each optimizer step, the int64 indices of its completions.
        micro_batches: micro-batches of each optimizer step; must divide the completions of a step.
        world_size: number of ranks that average their gradients.
    """
    batches = []
    for index in updates:
        step_tokens = world_total(int(experience.mask_BS[index].sum()), world_size)
        for part in index.chunk(micro_batches):
            batch = experience.take(part)
            scale = float(micro_batches * world_size)
            batches.append(replace(batch, step_tokens=step_tokens, loss_scale=scale))
    return batches


def world_total(count: int, world_size: int) -> int:
    """The sum of a count over all ranks."""
    if world_size == 1:
        return count
    total = torch.tensor(count)
    torch.distributed.all_reduce(total)
    return int(total)
