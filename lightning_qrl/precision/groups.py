"""Layer groups: the parts of a policy that a person would give a precision of their own.

Each is a name, the selectors that mean it in a recipe, and the layers that they mean:

    attention, mlp, ...         a named predicate
    first 15%, last 15%, ...    the decoder layers at one end
    layer 3                     one decoder layer
    self_attn.q_proj            one kind of layer, in every decoder layer
    lm_head                     a layer outside of them

Groups overlap. Two names of the very same layers are one group, which has the first of them.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_qrl.precision.select import PREDICATES, LastFraction, Linears, select

FRACTIONS = (0.15, 0.25)
EVERYTHING = "linears"


@dataclass(frozen=True, slots=True)
class Group:
    """Some layers of a policy.

    Attributes:
        name: for a person.
        select: selectors that mean these layers, and perhaps layers that nobody asked about.
        layers: full names.
    """

    name: str
    select: tuple[str, ...]
    layers: frozenset[str]


def find_groups(linears: Linears, among: Collection[str]) -> list[Group]:
    """The groups of a model.

    Args:
        linears: the model's layers.
        among: names of the layers that matter; groups hold no others. All of them together are no
            group, nor is none of them.
    """
    within = {name: layer for name, layer in linears.decoder.items() if name in among}
    others = sorted(linears.others & frozenset(among))
    every = frozenset([*within, *others])
    found: dict[frozenset[str], Group] = {}
    for name, selectors in (*_candidates(within, linears.layers), *((n, (n,)) for n in others)):
        layers = every & _meant(selectors, linears)
        if layers and layers != every:
            found.setdefault(layers, Group(name, selectors, layers))
    return list(found.values())


def _candidates(within: dict[str, int], count: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and selectors; some may mean nothing."""
    for name in PREDICATES:
        if name != EVERYTHING:
            yield name, (name,)
    globs = {i: f"{place_and_kind(name, i)[0]}.{i}.*" for name, i in within.items()}
    for fraction in FRACTIONS:
        size = LastFraction(fraction).count(count)
        yield f"first {fraction:.0%}", tuple(globs[i] for i in range(size) if i in globs)
        last = range(count - size, count)
        yield f"last {fraction:.0%}", tuple(globs[i] for i in last if i in globs)
    for i in sorted(globs):
        yield f"layer {i}", (globs[i],)
    for place, kind in dict.fromkeys(place_and_kind(name, i) for name, i in within.items()):
        yield kind, (f"{place}.*.{kind}",)


def _meant(selectors: tuple[str, ...], linears: Linears) -> frozenset[str]:
    meant: frozenset[str] = frozenset()
    for selector in selectors:
        with suppress(ValueError):  # it matches nothing
            meant |= select(selector, linears)
    return meant


def place_and_kind(name: str, layer: int) -> tuple[str, str]:
    """Where the decoder layers are, and what a layer is in each of them.

    ``("model.layers.3.mlp.experts.5.up_proj", 3)`` gives ``model.layers`` and
    ``mlp.experts.*.up_proj``.
    """
    place, _, inside = name.partition(f".{layer}.")
    return place, ".".join("*" if part.isdigit() else part for part in inside.split("."))


def weight_of(model: nn.Module, layer: str) -> Tensor:
    """The weight of a layer: [O, I] of a linear, [E, O, I] where the layer is a fused parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if layer not in parameters:
        return parameters[f"{layer}.weight"]
    experts = model.get_submodule(layer.rpartition(".")[0])
    fused = parameters[layer]
    return fused.mT if getattr(experts, "is_transposed", False) else fused
