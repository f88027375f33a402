"""Scoring: the log-probabilities of sampled tokens under a model, without computing a token twice.

A rollout of G completions a prompt holds every prompt G times, short completions several times, and
padding besides. With ``shared_prefix`` a batch is computed as the sampler does it: each distinct
prompt once, then each distinct completion on the key-value cache of its prompt, through which the
gradient flows back. Completions of similar length go together, so that little of what is computed
is padding. Without ``shared_prefix`` each row is one sequence, as in plain training. Either way the
head runs on what predicts a sampled token alone, chunk by chunk (see `logprobs`).

Where the routers of a mixture of experts choose as the sampler's did (see `routing`), a token is
the same as another if its experts are, too. So all of this goes by symbols then, numbers for
distinct pairs of id and routes, and what a symbol stands for is looked up as the model reads it.

B completions, T tokens, S = T - 1 predictions, D distinct rows, U distinct prompts, P longest
prompt, R rows of similar length, C the longest of them, N sampled tokens, H hidden, Y symbols.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lightning_qrl.errors import UserError
from lightning_qrl.experience import Experience
from lightning_qrl.logprobs import Scores, head_logprobs
from lightning_qrl.routing import Routers, symbols

TOLERANCE = 1e-3  # of the largest logit: rounding, but no other computation
BUCKETS = 4  # lengths of completions that are told apart
ROWS = 128  # completions of a whole rollout that are scored at one time
BUCKET_ROWS = 256  # completions that are worth a pass of their own


class Scorer:
    """Scores batches under one model.

    Args:
        model: a causal language model; not yet quantized, since it is tried on a few tokens.
        shared_prefix: compute each distinct prompt once.
        replay: let the routers choose as the batch says; without it they choose by themselves.

    Attributes:
        vocabulary: V, entries of the logits.
        routers: those of the model; None without ``replay``.

    Raises:
        UserError: the model's key-value cache does not give what its whole sequences give.
        ValueError: there is nothing to replay in such a model.
    """

    def __init__(
        self, model: PreTrainedModel, *, shared_prefix: bool, replay: bool = False
    ) -> None:
        self._model = model
        self.routers = Routers(model) if replay else None
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self._read = _after_shared_prompts if shared_prefix else _row_by_row
        training = model.training
        model.eval()  # dropout would make any two passes differ, and autocast rounds more
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            self._head_apart = _head_stands_apart(model)
            exact = not shared_prefix or _cache_is_exact(model)
        model.train(training)
        if not exact:
            raise UserError(
                f"{type(model).__name__}: its key-value cache changes its log-probabilities, so "
                "prompts cannot be computed once for all their completions; set "
                "grpo.shared_prefix=false"
            )

    def __call__(self, experience: Experience, temperature: float) -> Scores:
        """What the model makes of the sampled tokens; 0 outside the mask.

        Args:
            experience: the batch.
            temperature: divides the logits.

        Returns:
            Of each token [B, S], and, where the sampler told its likeliest tokens, of these.
        """
        mask_BS = experience.mask_BS
        hidden_NH = self._hidden(experience)
        targets_N = experience.input_ids_BT[:, 1:][mask_BS]
        kept_NK, wanted_NK = (
            None if ids is None else ids[mask_BS]
            for ids in (experience.kept_BSK, experience.head_ids_BSK)
        )
        scores = head_logprobs(
            hidden_NH, self._head, self.vocabulary, targets_N, temperature, kept_NK, wanted_NK
        )
        zeros_BS = torch.zeros_like(experience.logprobs_BS)
        logprobs_BS, entropy_BS, collision_BS = (
            zeros_BS.masked_scatter(mask_BS, column_N) for column_N in scores[:3]
        )
        head_BSK = None
        if scores.head is not None:
            zeros_BSK = zeros_BS[..., None].repeat(1, 1, scores.head.shape[-1])
            head_BSK = zeros_BSK.masked_scatter(mask_BS[..., None], scores.head)
        return Scores(logprobs_BS, entropy_BS, collision_BS, head_BSK)

    @torch.no_grad()
    def in_parts(
        self,
        experience: Experience,
        temperature: float,
        device: torch.device,
        parts: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Log-probabilities of a rollout, float32 [B, S], on the experience's device.

        Args:
            experience: a rollout, on any device.
            temperature: divides the logits.
            device: where to compute.
            parts: completions (int64 indices) that are scored at one time, where a token's numbers
                depend on those beside it; by default some at a time. What is in none stays 0.
        """
        logprobs_BS = torch.zeros_like(experience.logprobs_BS)
        for index in parts or torch.split(torch.arange(len(experience)), ROWS):
            part = self(experience.take(index).to(device), temperature).logprobs
            logprobs_BS[index, : part.shape[1]] = part.to(logprobs_BS.device)
        return logprobs_BS

    def _hidden(self, experience: Experience) -> Tensor:
        routers, routes_BSLK = self.routers, experience.routes_BSLK
        if routers is None or routes_BSLK is None:
            return self._read(self._body, experience)
        symbols_BT, ids_Y, routes_YLK = symbols(experience.input_ids_BT, routes_BSLK)

        def body(input_ids: Tensor, **inputs: Any) -> Tensor:
            with routers.replayed(routes_YLK[input_ids].flatten(0, 1)):
                return self._body(input_ids=ids_Y[input_ids], **inputs)

        return self._read(body, replace(experience, input_ids_BT=symbols_BT))

    def _body(self, **inputs: Any) -> Tensor:
        """What the head reads; where the head cannot be had by itself, the logits."""
        if self._head_apart:
            hidden: Tensor = self._model.base_model(**inputs).last_hidden_state
            return hidden
        logits: Tensor = self._model(**inputs).logits
        return logits

    def _head(self, hidden: Tensor) -> Tensor:
        return self._model.get_output_embeddings()(hidden) if self._head_apart else hidden


Body = Callable[..., Tensor]


def _row_by_row(body: Body, experience: Experience) -> Tensor:
    """What predicts the sampled tokens, [N, H], each row computed as one sequence.

    Right padding needs no attention mask: a causal policy never looks ahead.
    """
    hidden_BSH = body(input_ids=experience.input_ids_BT[:, :-1], use_cache=False)
    return hidden_BSH[experience.mask_BS]


def _after_shared_prompts(body: Body, experience: Experience) -> Tensor:
    """What predicts the sampled tokens, [N, H], each distinct prompt and row computed once.

    The prompt's last token predicts a completion's first one; the completion's own tokens, but for
    the last, predict the others.
    """
    row_N, prediction_N = experience.mask_BS.nonzero(as_tuple=True)
    place_N = prediction_N - (experience.prompt_length_B[row_N] - 1)  # in the completion
    rows = _distinct_rows(experience, row_N, place_N)
    ids_UP, prompt_D = _distinct_prompts(rows)
    read_UP, prompts = ids_UP >= 0, DynamicCache()
    hidden_UPH = body(
        input_ids=ids_UP.clamp_min(0),
        attention_mask=_unless_full(read_UP),
        position_ids=(read_UP.cumsum(dim=1) - 1).clamp_min(0),
        cache=prompts,
        use_cache=True,
    )
    pool = [hidden_UPH[:, -1].index_select(0, prompt_D)]
    filled, start_D = len(prompt_D), torch.zeros_like(prompt_D)
    for index_R in _by_length(rows.reads_D):
        part, longest = prompt_D[index_R], int(rows.reads_D[index_R[-1]])
        cache = _branch(prompts, part)
        hidden_RCH = _continue(body, rows.take(index_R), longest, cache, read_UP[part])
        start_D[index_R] = filled + longest * torch.arange(len(part), device=part.device)
        filled += longest * len(part)
        pool.append(hidden_RCH.flatten(0, 1))
    row_N = rows.row_B[row_N]
    where_N = torch.where(place_N > 0, start_D[row_N] + place_N - 1, row_N)
    return torch.cat(pool).index_select(0, where_N)


class _Rows(NamedTuple):
    """Distinct sequences that are read: prompts with the completions' tokens but for the last.

    ids_DT holds them, prompt_length_D and reads_D count the tokens of the prompt and those after
    it, and row_B says which of them each completion is.
    """

    ids_DT: Tensor
    prompt_length_D: Tensor
    reads_D: Tensor
    row_B: Tensor

    def take(self, index_R: Tensor) -> "_Rows":
        ids_RT, lengths_R = self.ids_DT[index_R], self.prompt_length_D[index_R]
        return _Rows(ids_RT, lengths_R, self.reads_D[index_R], self.row_B)


def _distinct_rows(experience: Experience, row_N: Tensor, place_N: Tensor) -> _Rows:
    ids_BT = experience.input_ids_BT
    length_B1 = experience.prompt_length_B[:, None].clamp_max(ids_BT.shape[1])  # cut: not in mask
    reads_B1 = torch.zeros_like(length_B1)
    reads_B1[:, 0].scatter_reduce_(0, row_N, place_N, "amax")
    unread_BT = torch.arange(ids_BT.shape[1], device=row_N.device) >= length_B1 + reads_B1
    rows_B = torch.cat([length_B1, reads_B1, ids_BT.masked_fill(unread_BT, 0)], dim=1)
    rows_D, row_B = torch.unique(rows_B, dim=0, return_inverse=True)
    return _Rows(rows_D[:, 2:], rows_D[:, 0], rows_D[:, 1], row_B)


def _distinct_prompts(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Left-padded prompts, int64 [U, P] with -1 as padding, and each row's own, int64 [D]."""
    length_D1 = rows.prompt_length_D[:, None]
    widest = int(length_D1.max())
    column_DP = length_D1 - widest + torch.arange(widest, device=length_D1.device)
    ids_DP = rows.ids_DT.gather(1, column_DP.clamp_min(0)).masked_fill(column_DP < 0, -1)
    ids_UP, prompt_D = torch.unique(ids_DP, dim=0, return_inverse=True)
    return ids_UP, prompt_D


def _by_length(reads_D: Tensor) -> Iterator[Tensor]:
    """Rows that read anything after the prompt, those of similar length together, longest last."""
    length_D, order_D = reads_D.sort()
    order = order_D[length_D > 0]
    parts = order.tensor_split(max(1, min(BUCKETS, len(order) // BUCKET_ROWS)))
    return (part for part in parts if len(part))


def _continue(
    body: Body, rows: _Rows, longest: int, cache: DynamicCache, read_RP: Tensor
) -> Tensor:
    """What ``longest`` tokens of some rows give after their prompts, [R, C, H].

    What a row gives beyond its own tokens is never looked at.
    """
    places_C = torch.arange(longest, device=read_RP.device)
    positions_RC = rows.prompt_length_D[:, None] + places_C
    read = torch.cat([read_RP, torch.ones_like(positions_RC, dtype=torch.bool)], dim=1)
    return body(
        input_ids=rows.ids_DT.gather(1, positions_RC.clamp_max(rows.ids_DT.shape[1] - 1)),
        attention_mask=_unless_full(read),
        position_ids=positions_RC,
        cache=cache,
        use_cache=True,
    )


def _branch(prompts: DynamicCache, index: Tensor) -> DynamicCache:
    """The keys and values of some prompts, to go on from, with gradient."""
    branch = DynamicCache()
    for number, layer in enumerate(prompts.layers):
        assert isinstance(layer, DynamicLayer)  # `_cache_is_exact` has seen to it
        keys, values = (getattr(layer, name).index_select(0, index) for name in ("keys", "values"))
        branch.update(keys, values, number)
    return branch


def _unless_full(read: Tensor) -> Tensor | None:
    """An attention mask, or None where there is no padding: attention is faster without one."""
    return None if read.all() else read.long()


def _head_stands_apart(model: PreTrainedModel) -> bool:
    """Whether the head's output is the logits; some models scale or cap them."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    ids_12 = torch.arange(2, device=head.weight.device)[None]
    hidden = model.base_model(input_ids=ids_12, use_cache=False).last_hidden_state
    return torch.equal(head(hidden), model(input_ids=ids_12, use_cache=False).logits)


def _cache_is_exact(model: PreTrainedModel) -> bool:
    """Whether two tokens one after the other give what they give at once."""
    layers = DynamicCache(config=model.config).layers
    if not all(isinstance(layer, DynamicLayer) for layer in layers):
        return False  # not of keys and values alone
    ids_12 = torch.arange(2, device=model.device)[None]
    cache = DynamicCache()
    at_once = model(input_ids=ids_12, use_cache=False).logits[:, -1]
    model(input_ids=ids_12[:, :1], cache=cache, use_cache=True)
    branch = _branch(cache, torch.zeros(1, dtype=torch.long, device=model.device))
    after = model(input_ids=ids_12[:, 1:], cache=branch, use_cache=True).logits[:, -1]
    return float((after - at_once).abs().max()) <= TOLERANCE * float(at_once.abs().max())
