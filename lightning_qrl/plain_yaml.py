"""YAML and interpolations that are data: nothing in a recipe runs, and nothing in it grows.

YAML can name Python objects (``!!python/object/apply:os.system``), repeat a node by an alias until
nine lines hold 10^9 values, and say a key twice, where the last one silently wins. OmegaConf can
call a function that anybody in the process has registered (``${eval:...}``). All that is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import yaml
from omegaconf.basecontainer import BaseContainer

from lightning_qrl.errors import UserError

MAX_VALUES = 20_000  # of a recipe, aliases written out
MAX_DEPTH = 40
OWN = "oc."  # OmegaConf's own resolvers: the environment, other keys, defaults
PLAIN = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
YAML_TAG = "tag:yaml.org,2002:"


def check_plain(text: str) -> str:
    """Check that a YAML text is plain data of a reasonable size.

    Returns:
        ``mapping``, ``sequence``, ``scalar``, or an empty text if it holds nothing.

    Raises:
        UserError: it is not; the message names the line.
        yaml.YAMLError: it is no YAML.
    """
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise UserError(f"it is nested more than {MAX_DEPTH} deep") from None
    if tree is None:
        return ""
    _count(tree, {}, 0)
    return type(tree).__name__.removesuffix("Node").lower()


def _count(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """How many values a node holds, with each alias written out."""
    line = node.start_mark.line + 1
    if depth > MAX_DEPTH:
        raise UserError(f"line {line}: it is nested more than {MAX_DEPTH} deep, or holds itself")
    if node.tag.removeprefix(YAML_TAG) not in PLAIN:
        raise UserError(f"line {line}: {node.tag.replace(YAML_TAG, '!!')} is no plain value")
    if id(node) not in counted:
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            parts = [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_count(part, counted, depth + 1) for part in parts)
    if counted[id(node)] > MAX_VALUES:
        raise UserError(f"line {line}: more than {MAX_VALUES} values, aliases written out")
    return counted[id(node)]


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"line {line}: a key is a name, not a list or a mapping")
        if key.value in seen:
            raise UserError(f"line {line}: key {key.value} is given twice; take one of them out")
        seen.add(key.value)


@contextmanager
def own_resolvers() -> Iterator[None]:
    """Let interpolations call OmegaConf's own resolvers alone, whatever else is registered."""
    everyone = BaseContainer._resolvers
    BaseContainer._resolvers = {n: call for n, call in everyone.items() if n.startswith(OWN)}
    try:
        yield
    finally:
        BaseContainer._resolvers = everyone
