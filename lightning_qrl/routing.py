"""Routing in mixtures of experts: what routers chose, recorded and replayed (R3).

A router has logits s over E experts for a token, and keeps K of them, I. With p = softmax(s), or
sigmoid(s) in DeepSeek's way, expert i enters the token's output with the share

    g_i = c p_i                          i in I
    g_i = c p_i / sum_{j in I} p_j       where the architecture normalizes; of a softmax that is
                                         exp(s_i) / sum_{j in I} exp(s_j), and c = 1

I is not continuous in s: where sampler and trainer differ by a rounding error, some token goes to
other experts. R3 (Ma et al., arXiv 2510.11370) computes the trainer's g with I of the sampler and s
of the trainer, through which the gradient flows as ever; a bias that only helps to choose stays out
of it. With the routes that the trainer would take by itself, nothing changes, not even a bit.

Nothing of a model is copied. The routers of transformers return (logits, shares, chosen experts), a
hook replaces the last two. Which of the formulas a router follows is found by trial, on random
numbers: an architecture that computes its shares in yet another way is refused, not approximated.

B sequences, T tokens of each, N tokens, L routers, E experts, K experts of a token, H hidden, Y
symbols, M = L K + 1.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_qrl.metrics import Metric

LIVE = -1  # stands for a choice that was not recorded: the router makes it
MOST = 2**62  # what an int64 holds with ease
TINY = 1e-20  # keeps shares finite where no recorded expert has any probability


@dataclass(frozen=True, slots=True)
class Gate:
    """How a router makes shares of its logits.

    Attributes:
        sigmoid: each expert by itself; otherwise a softmax over all of them.
        normalized: the shares of a token's experts are divided by their sum.
        scale: multiplies all of them.
    """

    sigmoid: bool
    normalized: bool
    scale: float

    def __call__(self, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """The shares of the chosen experts, float32 [N, K]."""
        scores_NE = logits_NE.float()
        p_NE = scores_NE.sigmoid() if self.sigmoid else scores_NE.softmax(dim=-1)
        share_NK = p_NE.gather(-1, chosen_NK)
        if self.normalized:
            share_NK = share_NK / share_NK.sum(dim=-1, keepdim=True).clamp_min(TINY)
        return share_NK if self.scale == 1 else share_NK * self.scale


class Routers:
    """The routers of a model, in its order.

    Args:
        model: a mixture of experts; on the meta device as well.

    Raises:
        ValueError: it is dense, or has a router that does not follow the formulas above.
    """

    def __init__(self, model: nn.Module) -> None:
        self._gates: dict[nn.Module, Gate] = {}
        by_class: dict[type, Gate] = {}
        for name, router in _find(model):
            kind = type(router)
            if kind not in by_class:
                by_class[kind] = _gate_of(name, router)
            self._gates[router] = by_class[kind]
        if not self._gates:
            raise ValueError("it is dense, so there is no choice of experts to replay")
        self._same: Tensor | float = 0.0
        self._seen: Tensor | float = 0.0

    @contextmanager
    def recorded(self) -> Iterator["Record"]:
        """Within, what the routers choose is recorded."""
        record = Record()
        with _hooked(dict.fromkeys(self._gates, record.see)):
            yield record

    @contextmanager
    def replayed(self, routes_NLK: Tensor) -> Iterator[None]:
        """Within, each router chooses as recorded.

        Args:
            routes_NLK: int64 [N, L, K], for the tokens of one forward pass in their order; `LIVE`
                throughout a token leaves it to the routers.
        """
        routes_LNK = routes_NLK.unbind(dim=1)
        replays = {
            router: self._replaying(gate, chosen_NK)
            for (router, gate), chosen_NK in zip(self._gates.items(), routes_LNK, strict=True)
        }
        with _hooked(replays):
            yield

    def agreement(self) -> Metric:
        """How often a router would have chosen the recorded experts itself, since the last call.

        Of tokens that were replayed with gradient, those of the training step; each router counts.
        """
        metric = Metric("mean", float(self._same), float(self._seen))
        self._same = self._seen = 0.0
        return metric

    def _replaying(self, gate: Gate, recorded_NK: Tensor) -> Callable[..., Any]:
        def replay(_: nn.Module, __: Any, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            logits_NE, share_NK, live_NK = outputs
            known_NK = recorded_NK != LIVE
            if torch.is_grad_enabled():
                taken_NK = (recorded_NK[..., None] == live_NK[:, None]).any(dim=-1)
                self._same = self._same + taken_NK.all(dim=-1).sum()  # never of a LIVE token
                self._seen = self._seen + known_NK[:, 0].sum()
            chosen_NK = recorded_NK.where(known_NK, live_NK)
            return logits_NE, gate(logits_NE, chosen_NK).to(share_NK.dtype), chosen_NK

        return replay


@contextmanager
def _hooked(hooks: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def symbols(ids_BT: Tensor, routes_BSLK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers for the distinct pairs of id and routes, int64 [B, T], and what they stand for.

    Symbol 0 is that of padding: token 0, left to the routers.

    Args:
        ids_BT: int64 [B, T], token ids.
        routes_BSLK: int16 [B, T - 1, L, K]: nothing reads the last token of a row.

    Returns:
        The symbols; of each of the Y symbols, its id, int64 [Y], and its routes, int64 [Y, L, K].
    """
    routes_NM = F.pad(routes_BSLK.flatten(2), (0, 0, 0, 1), value=LIVE).flatten(0, 1).long()
    columns_NM = torch.cat([ids_BT.flatten()[:, None], routes_NM], dim=-1)
    columns_NM = F.pad(columns_NM, (0, 0, 1, 0), value=LIVE)  # symbol 0: in order, it is the first
    symbol_N = _ranks(columns_NM - LIVE)
    columns_YM = columns_NM.new_empty(int(symbol_N.max()) + 1, columns_NM.shape[1])
    columns_YM[symbol_N] = columns_NM  # equal rows write the same
    routes_YLK = columns_YM[:, 1:].view(-1, *routes_BSLK.shape[2:])
    return symbol_N[1:].view_as(ids_BT), columns_YM[:, 0].clamp_min(0), routes_YLK


def _ranks(columns_NM: Tensor) -> Tensor:
    """The place of each row among the distinct rows in order, int64 [N], of numbers from 0 on.

    As `torch.unique` of rows gives it, but that takes ten times as long: here a row is read as the
    digits of one number, which is replaced by its rank where the next digit would not fit.
    """
    largest_M = columns_NM.amax(dim=0).tolist()
    rank_N, bound = torch.zeros_like(columns_NM[:, 0]), 1
    for column_N, largest in zip(columns_NM.unbind(dim=1), largest_M, strict=True):
        base = largest + 1
        if bound * base > MOST:
            rank_N, bound = torch.unique(rank_N, return_inverse=True)[1], len(rank_N)
        rank_N, bound = rank_N * base + column_N, bound * base
    final_N: Tensor = torch.unique(rank_N, return_inverse=True)[1]
    return final_N


class Record:
    """What the routers of a model chose in its last forward pass."""

    def __init__(self) -> None:
        self._chosen: list[Tensor] = []

    def see(self, _: nn.Module, __: Any, outputs: Sequence[Tensor]) -> None:
        """The hook of a router."""
        self._chosen.append(outputs[2].to(torch.int16))

    def take(self) -> Tensor:
        """Int16 [N, L, K], of the tokens in their order; then the next pass begins."""
        routes_NLK, self._chosen = torch.stack(self._chosen, dim=1), []
        return routes_NLK


def _find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the routers: what stands beside ``experts`` and picks the top k."""
    for name, block in model.named_modules():
        children = dict(block.named_children())
        if "experts" not in children:
            continue
        routers = [n for n, child in children.items() if hasattr(child, "top_k")]
        if len(routers) != 1:
            raise ValueError(f"its {name}, a {type(block).__name__}, has no router of a known kind")
        yield f"{name}.{routers[0]}", children[routers[0]]


@torch.no_grad()
def _gate_of(name: str, router: nn.Module) -> Gate:
    """The formula of a router, from what one of its class makes of random numbers.

    Raises:
        ValueError: it follows none.
    """
    unknown = f"its {name}, a {type(router).__name__}, weighs experts in an unknown way"
    try:
        logits_NE, share_NK, chosen_NK = _trial(router)
    except Exception as error:  # a router is anyone's code, and may raise anything
        raise ValueError(unknown) from error
    scale = getattr(router, "routed_scaling_factor", 1.0)
    for sigmoid, normalized in product([False, True], repeat=2):
        gate = Gate(sigmoid, normalized, scale)
        if torch.allclose(gate(logits_NE, chosen_NK), share_NK.float()):
            return gate
    raise ValueError(unknown)


def _trial(router: nn.Module, tokens: int = 64) -> Any:
    """What a router with random weights makes of random tokens."""
    twin = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in (
        *twin.parameters(),
        *twin.buffers(),
    ):  # a bias that helps to choose is random too
        tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    (hidden,) = {weight.shape[-1] for weight in twin.parameters() if weight.ndim == 2}
    return twin(torch.randn(tokens, hidden, generator=generator))
