"""Selectors: which linear layers of a model a rule is about.

A selector is an anchored glob on full names (``model.layers.*.mlp.down_proj``; ``*`` also crosses
dots), one of the named predicates below, or `LastFraction`. A layer is an `nn.Linear`, by its
module's name, or one fused parameter of a mixture's experts, by the parameter's
(``model.layers.0.mlp.experts.gate_up_proj``). Only decoder layers are candidates: embeddings and
norms are no linear layers.

Two kinds must be asked for outright. The head is selected by its exact name alone, since a
quantized head changes every probability. A router is selected by its exact name, or by a glob that
spells its part of the name (``*.mlp.gate``, but neither ``*.mlp.*`` nor ``*.mlp.gate*``): a wrong
expert is no rounding error.
"""

import difflib
import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lightning_qrl.precision.experts import expert_weights

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})  # whole parts of a name


@dataclass(frozen=True, slots=True)
class LastFraction:
    """The linear layers of the last decoder layers.

    Attributes:
        fraction: share of the decoder layers, 0 to 1, rounded to the nearest whole layer; at least
            one layer when above 0.
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction must be 0 to 1, got {self.fraction}")

    def __str__(self) -> str:
        return f"last_fraction({self.fraction})"

    def count(self, layers: int) -> int:
        """How many of ``layers`` decoder layers that is."""
        return max(1, math.floor(self.fraction * layers + 0.5)) if self.fraction else 0


Selector = str | LastFraction


@dataclass(frozen=True, slots=True)
class Linears:
    """The linear layers of a causal language model, by full name.

    Attributes:
        decoder: those inside decoder layers, with the index of their layer.
        others: those outside, such as the head.
        layers: number of decoder layers.

    Fused experts count as one linear layer a parameter.
    """

    decoder: dict[str, int]
    others: frozenset[str]
    layers: int


def find_linears(model: nn.Module) -> Linears:
    """List the linear layers of a model.

    The decoder layers are the longest of the model's outermost `nn.ModuleList`s: a list within a
    list, such as a layer's experts, may be longer.

    Raises:
        ValueError: the model has no decoder layers, or they hold no linear layer.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    if not outermost:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers")
    prefix = max(outermost, key=lambda name: len(lists[name]))
    decoder: dict[str, int] = {}
    others = set()
    for name in linear_shapes(model):
        if name.startswith(f"{prefix}."):
            decoder[name] = int(name.removeprefix(f"{prefix}.").split(".", 1)[0])
        else:
            others.add(name)
    if not decoder:
        kinds = sorted({type(m).__name__ for m in lists[prefix].modules() if not [*m.children()]})
        raise ValueError(
            f"the decoder layers of {type(model).__name__} hold no nn.Linear, which alone can be "
            f"quantized; they hold {', '.join(kinds)}"
        )
    return Linears(decoder, frozenset(others), len(lists[prefix]))


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The linear layers of a model in its order: (O, I), and (E, O, I) of fused experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[name] = (module.out_features, module.in_features)
        fused = expert_weights(module).items()
        shapes |= {f"{name}.{weight}": shape for weight, shape in fused}
    return shapes


def _has_part(*parts: str) -> Callable[[str], bool]:
    return lambda name: not _parts(name).isdisjoint(parts)


def _parts(name: str) -> frozenset[str]:
    return frozenset(name.split("."))


ROUTED, SHARED = ("experts",), ("shared_expert", "shared_experts", "shared_mlp")
PREDICATES: dict[str, Callable[[str], bool]] = {  # none of them means a router
    "linears": lambda name: True,
    "attention": _has_part("self_attn", "attn", "attention", "linear_attn"),
    "mlp": _has_part("mlp", "feed_forward", "block_sparse_moe", *ROUTED, *SHARED),
    "experts": _has_part(*ROUTED),
    "shared_experts": _has_part(*SHARED),
}


def select(selector: Selector, linears: Linears) -> frozenset[str]:
    """Names of the layers that a selector means; a fraction of 0 means none.

    Raises:
        ValueError: a glob or a predicate matches nothing.
    """
    plain = [name for name in linears.decoder if _parts(name).isdisjoint(ROUTERS)]
    if isinstance(selector, LastFraction):
        first = linears.layers - selector.count(linears.layers)
        return frozenset(name for name in plain if linears.decoder[name] >= first)
    if selector in linears.others or selector in linears.decoder:
        return frozenset([selector])
    if selector in PREDICATES:
        found = frozenset(filter(PREDICATES[selector], plain))
    else:
        spelt = ROUTERS & _parts(selector)
        routers = (name for name in linears.decoder if not spelt.isdisjoint(_parts(name)))
        found = frozenset(fnmatch.filter([*plain, *routers], selector))
    if not found:
        hint = _hint(selector, linears)
        raise ValueError(f"selector {selector!r} matches no linear layer; {hint}")
    return found


def _hint(selector: str, linears: Linears) -> str:
    """The nearest selector that means something in this model, or an example of one."""
    globs = [name.replace(f".{i}.", ".*.", 1) for name, i in linears.decoder.items()]
    short = [f"*.{name.rpartition('.')[2]}" for name in linears.decoder]
    predicates = [name for name, holds in PREDICATES.items() if any(map(holds, linears.decoder))]
    known = [*predicates, *sorted(linears.others), *linears.decoder, *globs, *short]
    near = difflib.get_close_matches(selector, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"try {globs[0]!r}"
