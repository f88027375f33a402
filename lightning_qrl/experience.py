"""What a rollout is: completions as sampled, and the batch that the loss is computed on.

Token ids are those that were sampled. Nothing here is ever decoded and encoded again: another
tokenization of the same text would train tokens that the policy never chose.

B completions, T tokens of prompt and completion, S = T - 1 predicted tokens, N new tokens, K kept
tokens.
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
        kept_NK: int64 [N, K], ids of the tokens that top_p, top_k or min_p left to sample from,
            each row filled up with -1; None where nothing was cut off.
        head_ids_NK: int64 [N, K], ids of the sampler's K likeliest tokens; None: not asked for.
        head_logprobs_NK: float32 [N, K], their log-probabilities.
        routes_TLK: int16 [T, L, K], the experts that each of L routers chose for each input token,
            the last sampled token left out, which nothing read; None: not asked for.
    """

    prompt_ids: tuple[int, ...]
    token_ids_N: Tensor
    logprobs_N: Tensor
    versions_N: Tensor
    truncated: bool
    kept_NK: Tensor | None = None
    head_ids_NK: Tensor | None = None
    head_logprobs_NK: Tensor | None = None
    routes_TLK: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer step that a micro-batch is a part of: what its loss is divided by.

    Attributes:
        tokens: sampled tokens that count, over all micro-batches and ranks.
        completions: completions with such a token, over all micro-batches and ranks.
        rank_tokens: sampled tokens that count, over the micro-batches of this rank.
        micro_batches: micro-batches of each rank.
        ranks: ranks that average their gradients.
    """

    tokens: int
    completions: int
    rank_tokens: int
    micro_batches: int = 1
    ranks: int = 1

    @property
    def scale(self) -> float:
        """What a micro-batch's loss is multiplied by.

        The trainer averages over micro-batches and ranks; this turns the average into a sum.
        """
        return float(self.micro_batches * self.ranks)


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
        prompt_length_B: int64 [B], tokens of each prompt.
        rewards_B: float32 [B], what the advantages were made from; NaN where there is none.
        advantages_B: float32 [B].
        truncated_B: bool [B].
        max_new_tokens: the sampler's length limit.
        step: the optimizer step that this batch is a part of.
        reference_BS: float32 [B, S], log-probabilities under the reference; None without one.
        kept_BSK: int64 [B, S, K], see `Completion`, -1 outside completions; None: nothing was cut.
        group_B: int64 [B], number of the group, completions of one prompt, that each belongs to.
        proximal_BS: float32 [B, S], the trainer's own log-probabilities before the first update on
            the rollout, where losses take their ratios against these (see `losses.base`).
        head_ids_BSK: int64 [B, S, K], see `Completion`, 0 outside completions.
        head_logprobs_BSK: float32 [B, S, K], the sampler's log-probabilities of these.
        routes_BSLK: int16 [B, S, L, K], see `Completion`; entry s is that of input token s, and -1
            where there is none.
    """

    input_ids_BT: Tensor
    mask_BS: Tensor
    logprobs_BS: Tensor
    versions_BS: Tensor
    prompt_length_B: Tensor
    rewards_B: Tensor
    advantages_B: Tensor
    truncated_B: Tensor
    max_new_tokens: int
    step: Step
    group_B: Tensor
    reference_BS: Tensor | None = None
    kept_BSK: Tensor | None = None
    proximal_BS: Tensor | None = None
    head_ids_BSK: Tensor | None = None
    head_logprobs_BSK: Tensor | None = None
    routes_BSLK: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids_BT)

    def to(self, device: torch.device | str) -> "Experience":
        """The same batch on another device."""
        return self._with({name: t.to(device) for name, t in self._tensors().items()})

    def take(self, index: Tensor) -> "Experience":
        """The completions at ``index``; ``step`` counts them alone.

        Columns that are padding in all of them are cut off.
        """
        rows = {name: tensor[index] for name, tensor in self._tensors().items()}
        used = rows["mask_BS"].any(dim=0).nonzero()
        width = int(used.max()) + 1 if len(used) else 1
        for name in rows:
            if "_BS" in name:
                rows[name] = rows[name][:, :width]
        rows["input_ids_BT"] = rows["input_ids_BT"][:, : width + 1]
        return replace(self._with(rows), step=count_step(rows["mask_BS"]))

    def where(self, counts_B: Tensor) -> "Experience":
        """The same batch, of which only the completions where ``counts_B`` (bool [B]) count."""
        mask_BS = self.mask_BS & counts_B[:, None]
        return replace(self, mask_BS=mask_BS, step=count_step(mask_BS))

    def _with(self, tensors: dict[str, Any]) -> "Experience":
        return replace(self, **tensors)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def make_experience(
    completions: Sequence[Completion],
    rewards_B: Tensor,
    advantages_B: Tensor,
    pad_id: int,
    max_new_tokens: int | None = None,
    group_size: int = 1,
) -> Experience:
    """Lay completions out as one right-padded batch.

    Args:
        completions: B completions of any lengths, each of at least one token.
        rewards_B: float32 [B].
        advantages_B: float32 [B].
        pad_id: token id that fills the padding.
        max_new_tokens: the length limit they were sampled with; by default the longest's length.
        group_size: completions of each prompt, side by side.
    """
    prompts = [torch.tensor(c.prompt_ids) for c in completions]
    ids = [torch.cat([p, c.token_ids_N]) for p, c in zip(prompts, completions, strict=True)]

    def aligned(values: Sequence[Tensor], fill: float = 0) -> Tensor:
        known_N = torch.cat(list(values))  # the mask's tokens, in its order
        laid_out_BS = known_N.new_full((*mask_BS.shape, *known_N.shape[1:]), fill)
        laid_out_BS[mask_BS] = known_N
        return laid_out_BS

    def aligned_if_told(values: Sequence[Tensor | None]) -> Tensor | None:
        told = [value for value in values if value is not None]
        return aligned(told) if told else None

    prompt_length_B = torch.tensor([len(p) for p in prompts])
    length_B1 = torch.tensor([len(i) for i in ids])[:, None]
    input_ids_BT = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    target_S = torch.arange(1, input_ids_BT.shape[1])
    mask_BS = (target_S >= prompt_length_B[:, None]) & (target_S < length_B1)
    kept = [c.kept_NK for c in completions if c.kept_NK is not None]
    widest = max((k.shape[1] for k in kept), default=0)
    routes = [c.routes_TLK for c in completions if c.routes_TLK is not None]
    return Experience(
        input_ids_BT=input_ids_BT,
        mask_BS=mask_BS,
        logprobs_BS=aligned([c.logprobs_N for c in completions]),
        versions_BS=aligned([c.versions_N for c in completions]),
        prompt_length_B=prompt_length_B,
        rewards_B=rewards_B,
        advantages_B=advantages_B,
        truncated_B=torch.tensor([c.truncated for c in completions]),
        max_new_tokens=max_new_tokens or max(len(c.token_ids_N) for c in completions),
        step=count_step(mask_BS),
        group_B=torch.arange(len(completions)) // group_size,
        kept_BSK=aligned([_widen(k, widest) for k in kept], fill=-1) if kept else None,
        head_ids_BSK=aligned_if_told([c.head_ids_NK for c in completions]),
        head_logprobs_BSK=aligned_if_told([c.head_logprobs_NK for c in completions]),
        routes_BSLK=pad_sequence(routes, True, padding_value=-1) if routes else None,
    )


def _widen(kept_NK: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(kept_NK.long(), (0, width - kept_NK.shape[1]), value=-1)


def count_step(mask_BS: Tensor) -> Step:
    """The step of a batch that is a whole optimizer step by itself."""
    tokens = int(mask_BS.sum())
    return Step(tokens, int(mask_BS.any(dim=1).sum()), tokens)


def split_for_updates(
    experience: Experience, updates: Sequence[Tensor], micro_batches: int, world_size: int = 1
) -> list[Experience]:
    """Cut a rollout into the micro-batches of its optimizer steps.

    Splitting changes no gradient: each micro-batch knows the counts of its whole step, and undoes
    the trainer's division by the number of micro-batches and of ranks.

    Args:
        experience: the rollout of this rank.
        updates: for each optimizer step, the int64 indices of its completions.
        micro_batches: micro-batches of each optimizer step, at most its completions.
        world_size: number of ranks that average their gradients.
    """
    batches = []
    for index in updates:
        own = count_step(experience.mask_BS[index])
        tokens, completions = world_total((own.tokens, own.completions), world_size)
        step = Step(tokens, completions, own.tokens, micro_batches, world_size)
        parts = index.tensor_split(micro_batches)
        batches += [replace(experience.take(part), step=step) for part in parts]
    return batches


def world_total(counts: Sequence[int], world_size: int) -> list[int]:
    """The sum of each count over all ranks."""
    if world_size == 1:
        return list(counts)
    gathered: list[Sequence[int]] = [()] * world_size
    torch.distributed.all_gather_object(gathered, counts)  # whatever device the backend is for
    return [sum(each) for each in zip(*gathered, strict=True)]
