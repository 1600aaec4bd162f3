"""A YAML document with the line of every key.

The values are those of ``yaml.safe_load``, except that a plain ``3e-4`` is a number, as in YAML 1.2. PyYAML (YAML 1.1)
reads it as a string. Quote it to get a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

MOST_VALUES = 100_000
"""The maximum number of values with repetitions by aliases. Nested aliases may expand to billions."""

DEEPEST = 100
"""The maximum nesting depth of lists and mappings."""

KeyPath = tuple[object, ...]

_FLOAT_TAG = "tag:yaml.org,2002:float"
_NO_TEXT = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "timestamp", "binary"))
_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")

# Parts of PyYAML's messages, each with an explanation for the author of the file.
_EXPLANATIONS = (
    ("character '\\t'", "a tab where YAML wants spaces; indent with spaces"),
    ("mapping values are not allowed", "a ':' where no key is possible; check the indentation, or quote the value"),
    ("expected <block end>", "the indentation does not match the lines above"),
    ("could not find expected ':'", "a ':' is missing after a key"),
    ("expected ',' or", "a bracket is not closed, or a comma is missing"),
    ("expected the node content", "a value is missing, or a bracket is not closed"),
    ("unexpected end of stream", "a quotation mark is not closed"),
    ("could not determine a constructor", "a tag that is not plain YAML; write plain values"),
    ("found undefined alias", "an alias (*name) without its anchor (&name)"),
    ("found another document", "a second document ('---'); a config is one document"),
    ("special characters are not allowed", "a control character that YAML does not allow"),
    ("unhashable key", "a key that is a list or a mapping; keys are plain words"),
)


class YamlError(Exception):
    """The text is not readable YAML; ``line`` counts from 1."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


@dataclass(frozen=True)
class YamlDocument:
    """Plain data, the line of every key path (``()`` for the root) and the keys given twice.

    ``lines`` has keys as written. ``written`` has the spelling of keys that YAML does not read as text. Its paths end
    with pydantic's name of the key, such as ``"None"`` for ``null``.
    """

    data: Any
    lines: dict[KeyPath, int]
    duplicates: tuple[tuple[KeyPath, int, int], ...]
    written: dict[KeyPath, str] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats, and with line numbers for values that it cannot construct.

    It stops at the first value beyond a limit. PyYAML takes most of a minute for a megabyte of such values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values, self._depth = 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._values, self._depth = self._values + 1, self._depth + 1
        line = self.peek_event().start_mark.line + 1
        if self._values > MOST_VALUES:
            raise _too_many(line)
        if self._depth > DEEPEST:
            raise YamlError(line, f"nested too deeply: more than {DEEPEST} lists and mappings in one another")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            made = super().construct_object(node, deep)
            if isinstance(made, int):
                str(made)  # raises if a number in base 16 or 60 has more digits than Python prints
            return made
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            # SafeLoader raises KeyError for `!!bool x` and AttributeError for `!!timestamp x`.
            given = str(node.value) if len(str(node.value)) <= 40 else f"{len(str(node.value))} characters"
            kind = node.tag.rpartition(":")[2]
            problem = f"a value that its YAML type {kind} does not allow ({given})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    r"""Return a string, with JSON's surrogate pairs (``"\ud83d\ude00"``) joined. Half a pair cannot be encoded."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise yaml.constructor.ConstructorError(None, None, "half a surrogate pair", node.start_mark) from None


_Loader.add_constructor("tag:yaml.org,2002:str", _text)
_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))


def read_yaml(text: str) -> YamlDocument:
    """Read one YAML document. The data of an empty document is None.

    Raises:
        YamlError: the text is not YAML, or has an alias that contains itself or expands to too many values.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlDocument(None, {(): 1}, ())
        _check_size(node, [], {})
        keys = list(_keys(node))  # before construction, which merges keys into the nodes
        written = dict(_written(loader, node))
        data = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise _explained(error, text) from None
    except RecursionError:
        raise YamlError(1, "nested too deeply to be read") from None
    duplicates = tuple((path, line, first) for path, line, first in keys if first is not None)
    return YamlDocument(data, {(): _line(node)} | {path: line for path, line, _ in keys}, duplicates, written)


def _check_size(node: yaml.Node, above: list[yaml.Node], sizes: dict[int, int]) -> int:
    """Return the number of values in a node, counting each use of an alias or merge; cached in ``sizes``.

    Raises:
        YamlError: there are more than ``MOST_VALUES``, or an alias contains itself.
    """
    if node in above:
        raise YamlError(_line(node), "an alias that contains itself")
    if id(node) not in sizes:
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        sizes[id(node)] = 1 + sum(_check_size(part, [*above, node], sizes) for part in parts)
    if sizes[id(node)] > MOST_VALUES:
        raise _too_many(_line(node))
    return sizes[id(node)]


def _too_many(line: int) -> YamlError:
    return YamlError(line, f"more than {MOST_VALUES:,} values, with those that aliases repeat; write plain values")


def _keys(node: yaml.Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int, int | None]]:
    """Yield each key and item below a node: its path, its line, and the line of an earlier duplicate."""
    first: dict[tuple[str, str], int] = {}
    for key, value, here in _children(node, path):
        line = _line(key or value)
        yield here, line, first.get((key.tag, key.value)) if key else None
        if key:
            first.setdefault((key.tag, key.value), line)
        yield from _keys(value, here)


def _written(loader: yaml.SafeLoader, node: yaml.Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    for key, value, here in _children(node, path):
        if key and key.tag in _NO_TEXT:
            made = loader.construct_object(key)
            yield (*path, repr(int(made) if isinstance(made, bool) else made)), str(key.value)
        yield from _written(loader, value, here)


def _children(node: yaml.Node, path: KeyPath) -> Iterator[tuple[yaml.ScalarNode | None, yaml.Node, KeyPath]]:
    """Yield the key (None in a sequence), value and path of each direct child of ``node``."""
    if isinstance(node, yaml.SequenceNode):
        yield from ((None, item, (*path, index)) for index, item in enumerate(node.value))
    elif isinstance(node, yaml.MappingNode):
        pairs = ((key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode))
        yield from ((key, value, (*path, key.value)) for key, value in pairs)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _explained(error: yaml.YAMLError, text: str) -> YamlError:
    said = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    mark = getattr(error, "problem_mark", None)
    # A ReaderError has an offset instead of a mark.
    line = int(mark.line) + 1 if mark is not None else text.count("\n", 0, getattr(error, "position", 0)) + 1
    explanation = next((meant for sign, meant in _EXPLANATIONS if sign in said), "")
    return YamlError(line, f"not YAML: {explanation} ({said})" if explanation else f"not YAML: {said}")
