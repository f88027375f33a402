"""YAML and interpolations that are data: reading them runs nothing, and nothing in them grows.

YAML can name Python objects (``!!python/object/apply:os.system``), repeat a node by an alias until
nine lines hold 10^9 values, and say a key twice, where the last one silently wins. OmegaConf can
call a function that anybody in the process has registered (``${eval:...}``), and repeats by
interpolation what YAML repeats by an alias. All that is refused.

What a recipe may do is name classes of tasks and callbacks (``_target_``), which imports their
modules: see `build`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from omegaconf import Node
from omegaconf.basecontainer import BaseContainer

from lightning_qrl.errors import UserError

MAX_VALUES = 20_000  # of a recipe, aliases written out
MAX_CHARACTERS = 1_000_000  # of a recipe, and of what its interpolations give
MAX_DEPTH = 40
MAX_BITS = 256  # of an integer
EACH = 4  # values that an interpolation counts as: it takes time
RESOLVING = ("_resolve_node_interpolation", "_evaluate_custom_resolver")
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
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"it has {len(text)} characters; the longest may have {MAX_CHARACTERS}")
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
    """Let interpolations call OmegaConf's own resolvers alone, and only so often.

    A list of interpolations of lists of interpolations grows as aliases do, and so does a text.
    So it is counted, inside OmegaConf, what is resolved and what is written out.

    Raises:
        UserError: it comes to too many values or too long a text.
    """
    everyone, growth = BaseContainer._resolvers, _Growth()
    write_out: Any = BaseContainer._to_content
    BaseContainer._resolvers = {n: call for n, call in everyone.items() if n.startswith(OWN)}
    BaseContainer._to_content = staticmethod(growth.before(write_out))  # type: ignore[method-assign]
    for name in RESOLVING:
        setattr(BaseContainer, name, growth.after(getattr(BaseContainer, name)))
    try:
        yield
    except Exception:
        growth.check()  # OmegaConf wraps what is raised
        raise
    finally:
        BaseContainer._resolvers = everyone
        BaseContainer._to_content = staticmethod(write_out)  # type: ignore[method-assign]
        for name in RESOLVING:
            delattr(BaseContainer, name)  # they are inherited


class _Growth:
    """Counts what is resolved and written out, and stops where it is too much."""

    def __init__(self) -> None:
        self.values = self.characters = 0

    def check(self) -> None:
        if self.values > MAX_VALUES or self.characters > MAX_CHARACTERS:
            raise UserError(
                f"its interpolations come to more than {MAX_VALUES} values or {MAX_CHARACTERS} "
                "characters"
            )

    def before(self, write_out: Callable[..., Any]) -> Callable[..., Any]:
        def counted(container: Any, *args: Any, **how: Any) -> Any:
            self._add(container)
            return write_out(container, *args, **how)

        return counted

    def after(self, resolve: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **how: Any) -> Any:
            self.check()
            found = resolve(*args, **how)
            self.values += EACH
            self._add(found)
            return found

        return counted

    def _add(self, found: Any) -> None:
        content = found._value() if isinstance(found, Node) else found
        parts = list(content.values()) if isinstance(content, dict) else [content]
        parts = content if isinstance(content, list) else parts
        texts = [part._value() if isinstance(part, Node) else part for part in parts]
        self.values += len(parts)
        self.characters += sum(len(text) for text in texts if isinstance(text, str))
        self.check()


def check_numbers(values: Any) -> None:
    """Raise UserError where a number is too long to be written out."""
    if isinstance(values, dict | list):
        for part in values.values() if isinstance(values, dict) else values:
            check_numbers(part)
    elif isinstance(values, int) and values.bit_length() > MAX_BITS:
        raise UserError(f"a number of {values.bit_length()} bits; the longest has {MAX_BITS}")
