"""The embedded rollout engine: sampling in process, on the very modules that are trained.

Sampler and trainer share their weights and their quantized layers, so what the sampler computes
differs from what the trainer computes only by the order of floating-point sums (a key-value cache
and one token at a time, against the whole sequence at once).

Each distinct sequence is computed once. The completions of a prompt begin as one row of the
key-value cache, part where their tokens part, and leave it where they end: at every step a row goes
through the policy for each distinct (row, token) that some completion is at. Prompts are
left-padded. Log-probabilities are taken in FP32 from the distribution that is sampled: logits
divided by the temperature, then truncated, if at all (see `_truncation`).

N = prompts x samples completions, D distinct sequences, P prompt tokens, T new tokens,
V vocabulary, A completions that have not ended, L routers, K experts of a token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from lightning_qrl.experience import Completion
from lightning_qrl.rollouts._draw import draw
from lightning_qrl.rollouts._truncation import Truncation, kept_ids
from lightning_qrl.rollouts.base import NonfiniteLogits
from lightning_qrl.routing import Record, Routers

COLDEST, HOTTEST = 1e-6, 1e6  # temperatures that logits in FP32 are divided by without harm


class Embedded:
    """Samples from the modules that it is synchronized with.

    Args:
        eos_id: token id that ends a completion.
        pad_id: token id that fills the padding.
        temperature: divides the logits; greater than 0.
        top_p: keep the likeliest tokens that together reach this probability; 1 keeps all.
        top_k: keep so many of the likeliest tokens; 0 keeps all.
        min_p: keep the tokens at least so many times as likely as the likeliest; 0 keeps all.
        max_new_tokens: length limit of a completion, the end-of-sequence token included.

    Attributes:
        head: each token carries the log-probabilities of so many of the likeliest tokens.
        follows_plan: it samples from the modules that the plan was committed to.
        routes: each completion carries the experts that its tokens went to.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        eos_id: int,
        pad_id: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_new_tokens: int = 8,
    ) -> None:
        if not COLDEST <= temperature <= HOTTEST:
            raise ValueError(
                f"temperature must be above 0, from {COLDEST:g} to {HOTTEST:g}, got {temperature}"
            )
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.temperature = temperature
        self.truncation = Truncation(top_p=top_p, top_k=top_k, min_p=min_p)
        self.max_new_tokens = max_new_tokens
        self.head = 0
        self.follows_plan = True
        self.routes = False
        self._model: PreTrainedModel | None = None
        self._version = 0
        self._routers: Routers | None = None  # those of the model, once they are asked for

    def sync(self, model: nn.Module, version: int) -> None:
        """Sample from ``model`` itself; stamp tokens with ``version``."""
        if model is not self._model:
            self._routers = None
        self._model, self._version = cast(PreTrainedModel, model), version

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        seed: int,
        limits: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Sample ``samples`` completions of each prompt (see `RolloutEngine.generate`)."""
        assert self._model is not None, "sync() comes before generate()"
        generator = torch.Generator().manual_seed(seed)
        most = [self.max_new_tokens] * len(prompts) if limits is None else limits
        drafts = _Drafts([limit for limit in most for _ in range(samples)])
        with evaluating(self._model), self._recorded(self._model) as record:
            self._sample(self._model, prompts, drafts, generator, record)
        return drafts.completions(prompts, self._version, self.eos_id)

    def _recorded(self, model: PreTrainedModel) -> AbstractContextManager[Record | None]:
        if not self.routes:
            return nullcontext()
        self._routers = self._routers or Routers(model)
        return self._routers.recorded()

    def _sample(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        drafts: "_Drafts",
        generator: torch.Generator,
        record: Record | None,
    ) -> None:
        device = next(model.parameters()).device
        ids_DP, mask_DP = self._left_padded(prompts, device)
        cache = DynamicCache(config=model.config)
        active_A = torch.arange(len(drafts), device=device)
        row_A = active_A // (len(drafts) // len(prompts))  # where each of them is computed
        limit_N = drafts.limit_N.to(device)
        for t in range(int(limit_N.max())):
            scores_DV = self._scores(model, ids_DP, mask_DP, cache)
            routes = {} if record is None else drafts.read(record.take(), ids_DP.shape, row_A)
            logprobs_DV = F.log_softmax(scores_DV, dim=-1)
            uniform_N = torch.rand(len(drafts), dtype=torch.float64, generator=generator)
            token_A = draw(logprobs_DV, row_A, uniform_N.to(device)[active_A])
            drafts.add(
                active_A, tokens=token_A, logprobs=logprobs_DV[row_A, token_A],
                **self._likeliest(logprobs_DV, row_A), **routes,
            )  # fmt: skip
            if self.truncation:
                drafts.keep(active_A, row_A, kept_ids(scores_DV))
            going = (token_A != self.eos_id) & (limit_N[active_A] > t + 1)
            active_A = active_A[going]
            if not len(active_A):
                return
            vocabulary = scores_DV.shape[-1]
            pairs_A = row_A[going] * vocabulary + token_A[going]
            pairs_D, row_A = torch.unique(pairs_A, return_inverse=True)
            parent_D, ids_DP = pairs_D // vocabulary, (pairs_D % vocabulary)[:, None]
            if not torch.equal(parent_D, torch.arange(len(mask_DP), device=device)):
                cache.reorder_cache(parent_D)
            mask_DP = F.pad(mask_DP[parent_D], (0, 1), value=1)

    def _scores(
        self, model: PreTrainedModel, ids_DP: Tensor, mask_DP: Tensor, cache: DynamicCache
    ) -> Tensor:
        """What the next token is sampled from: logits by the temperature, truncated; float32."""
        positions_DP = (mask_DP.cumsum(dim=-1) - 1).clamp_min(0)[:, -ids_DP.shape[1] :]
        logits_DV: Tensor = model(
            input_ids=ids_DP,
            attention_mask=mask_DP,
            position_ids=positions_DP,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if not logits_DV.isfinite().all():
            raise NonfiniteLogits("the policy's logits are not finite")
        return self.truncation(logits_DV.float() / self.temperature)

    def _likeliest(self, logprobs_DV: Tensor, row_A: Tensor) -> dict[str, Tensor]:
        """The likeliest tokens of each distribution, if they are asked for."""
        if not self.head:
            return {}
        head = logprobs_DV.topk(min(self.head, logprobs_DV.shape[-1]), dim=-1)
        return {"head_logprobs": head.values[row_A], "head_ids": head.indices[row_A]}

    def _left_padded(
        self, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        width = max(len(prompt) for prompt in prompts)
        ids = [[self.pad_id] * (width - len(p)) + list(p) for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class _Drafts:
    """Completions while they are sampled."""

    def __init__(self, limits: Sequence[int]) -> None:
        self.limit_N = torch.tensor(limits)
        self._steps: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._kept: list[list[Tensor]] = [[] for _ in limits]
        self._prompts_DPLK: Tensor | None = None  # routes of all but the prompts' last tokens

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, active_A: Tensor, **values: Tensor) -> None:
        """What is known of the next token of the completions ``active_A``: [A, ...] each."""
        known = {name: value.cpu() for name, value in values.items()}
        self._steps.append((active_A.cpu(), known))

    def read(self, routes_NLK: Tensor, shape: torch.Size, row_A: Tensor) -> dict[str, Tensor]:
        """Where the tokens went that were read, [D, P]; of those that predict the next, a value."""
        routes_DPLK = routes_NLK.view(*shape, *routes_NLK.shape[1:])
        if self._prompts_DPLK is None:
            self._prompts_DPLK = routes_DPLK[:, :-1].cpu()
        return {"routes": routes_DPLK[:, -1][row_A]}

    def keep(self, active_A: Tensor, row_A: Tensor, kept_D: list[Tensor]) -> None:
        """The ids that each of these tokens was chosen from: those of its row."""
        for n, row in zip(active_A.tolist(), row_A.tolist(), strict=True):
            self._kept[n].append(kept_D[row])

    def completions(
        self, prompts: Sequence[Sequence[int]], version: int, eos_id: int
    ) -> list[Completion]:
        """All of them, those of one prompt side by side."""
        lengths_N = torch.zeros(len(self), dtype=torch.int64)
        for active_A, _ in self._steps:
            lengths_N[active_A] += 1
        known = {name: self._laid_out(name) for name in self._steps[0][1]}
        ends_N1 = known["tokens"].gather(1, lengths_N[:, None] - 1)
        truncated = (ends_N1[:, 0] != eos_id).tolist()
        versions_T = torch.full((len(self._steps),), version)
        samples = len(self) // len(prompts)
        routes_of = self._routes(known, samples)
        return [
            Completion(
                prompt_ids=tuple(prompts[n // samples]),
                token_ids_N=known["tokens"][n, :length],
                logprobs_N=known["logprobs"][n, :length],
                versions_N=versions_T[:length],
                truncated=truncated[n],
                kept_NK=pad_sequence(kept, batch_first=True, padding_value=-1) if kept else None,
                head_ids_NK=known["head_ids"][n, :length] if self._told else None,
                head_logprobs_NK=known["head_logprobs"][n, :length] if self._told else None,
                routes_TLK=routes_of(n, len(prompts[n // samples]), length),
            )
            for n, (length, kept) in enumerate(zip(lengths_N.tolist(), self._kept, strict=True))
        ]

    def _routes(self, known: dict[str, Tensor], samples: int) -> Callable[..., Tensor | None]:
        """What gives those of a completion, from its number, its prompt's length and its own."""
        if self._prompts_DPLK is None:
            return lambda *_: None
        before = self._prompts_DPLK.shape[1]
        prompts_NPLK = self._prompts_DPLK.repeat_interleave(samples, dim=0)
        routes_NTLK = torch.cat([prompts_NPLK, known["routes"]], dim=1)
        return lambda n, prompt, length: routes_NTLK[n, before - prompt + 1 : before + length]

    @property
    def _told(self) -> bool:
        return "head_ids" in self._steps[0][1]

    def _laid_out(self, name: str) -> Tensor:
        """Something that is known of each token, [N, T, ...]; 0 where there is none."""
        first = self._steps[0][1][name]
        all_NT = first.new_zeros(len(self), len(self._steps), *first.shape[1:])
        for t, (active_A, values) in enumerate(self._steps):
            all_NT[active_A, t] = values[name]
        return all_NT


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and each back into its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
