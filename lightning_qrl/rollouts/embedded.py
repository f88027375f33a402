"""The embedded rollout engine: sampling in process, on the very modules that are trained.

Sampler and trainer share their weights and their quantized layers, so what the sampler computes
differs from what the trainer computes only by the order of floating-point sums (a key-value cache
and one token at a time, against the whole sequence at once).

Prompts are left-padded and run once; their key-value cache is then repeated for the samples of each
prompt. Log-probabilities are taken in FP32 from the distribution that is sampled (logits divided by
the temperature, nothing truncated). Sampling stops as soon as every completion has ended.

N = prompts x samples sequences, P prompt tokens, T new tokens, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_qrl.errors import UserError
from lightning_qrl.experience import Completion


class Embedded:
    """Samples from the modules that it is synchronized with.

    Args:
        eos_id: token id that ends a completion.
        pad_id: token id that fills the padding.
        temperature: divides the logits; greater than 0.
        max_new_tokens: length limit of a completion, the end-of-sequence token included.
        max_staleness: versions that a rollout may lag behind when its first update begins. This
            engine samples and trains in turn, so 0 is what it does and all that it takes.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        eos_id: int,
        pad_id: int,
        temperature: float = 1.0,
        max_new_tokens: int = 8,
        max_staleness: int = 0,
    ) -> None:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if max_staleness != 0:
            raise ValueError(
                f"max_staleness must be 0, got {max_staleness}: "
                "the embedded engine samples and trains in turn"
            )
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self._model: nn.Module | None = None
        self._version = 0

    def sync(self, model: nn.Module, version: int) -> None:
        """Sample from ``model`` itself; stamp tokens with ``version``."""
        self._model, self._version = model, version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], *, samples: int, seed: int
    ) -> list[Completion]:
        """Sample ``samples`` completions of each prompt (see `RolloutEngine.generate`)."""
        assert self._model is not None, "sync() comes before generate()"
        with evaluating(self._model):
            tokens_NT, logprobs_NT = self._sample(self._model, prompts, samples, seed)
        rows = zip(_repeat(prompts, samples), tokens_NT.cpu(), logprobs_NT.cpu(), strict=True)
        return [self._completion(prompt, tokens, logprobs) for prompt, tokens, logprobs in rows]

    def _sample(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], samples: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        ids_BP, mask_BP = self._left_padded(prompts, device)
        cache = DynamicCache()
        logits_BV = self._next_logits(model, ids_BP, mask_BP, cache)
        cache.batch_repeat_interleave(samples)
        logits_NV = logits_BV.repeat_interleave(samples, dim=0)
        mask_NT = mask_BP.repeat_interleave(samples, dim=0)
        done_N = torch.zeros(len(logits_NV), dtype=torch.bool, device=device)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        while True:
            token_N, logprob_N = self._draw(logits_NV, generator)
            tokens.append(token_N.masked_fill(done_N, self.pad_id))
            logprobs.append(logprob_N)
            done_N = done_N | (token_N == self.eos_id)
            if done_N.all() or len(tokens) == self.max_new_tokens:
                return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)
            mask_NT = F.pad(mask_NT, (0, 1), value=1)
            logits_NV = self._next_logits(model, tokens[-1][:, None], mask_NT, cache)

    def _draw(self, logits_NV: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if not logits_NV.isfinite().all():
            raise UserError(
                f"the policy's logits are not finite after {self._version} optimizer steps: "
                "training has diverged; lower optimizer.lr"
            )
        logprobs_NV = F.log_softmax(logits_NV.float() / self.temperature, dim=-1)
        token_N1 = torch.multinomial(logprobs_NV.exp(), 1, generator=generator)
        return token_N1[:, 0], logprobs_NV.gather(-1, token_N1)[:, 0]

    def _next_logits(
        self, model: nn.Module, ids: Tensor, mask: Tensor, cache: DynamicCache
    ) -> Tensor:
        positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _left_padded(
        self, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        width = max(len(prompt) for prompt in prompts)
        ids = [[self.pad_id] * (width - len(p)) + list(p) for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _completion(
        self, prompt: Sequence[int], tokens_T: Tensor, logprobs_T: Tensor
    ) -> Completion:
        ends = (tokens_T == self.eos_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens_T)
        return Completion(
            prompt_ids=tuple(prompt),
            token_ids_N=tokens_T[:length],
            logprobs_N=logprobs_T[:length],
            versions_N=torch.full((length,), self._version),
            truncated=not len(ends),
        )


def _repeat(prompts: Sequence[Sequence[int]], samples: int) -> Iterator[Sequence[int]]:
    return (prompt for prompt in prompts for _ in range(samples))


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
