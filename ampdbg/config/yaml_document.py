"""A YAML document with the line of every key.

The values are those of ``yaml.safe_load`` with one exception: a plain ``3e-4`` is the number that YAML 1.2
and everyone who writes it mean, where PyYAML (YAML 1.1) reads a string. Quote it to have a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

MOST_VALUES = 100_000
"""So many values a config may hold, with those that its aliases repeat: aliases of aliases may be billions."""

DEEPEST = 100
"""So many lists and mappings may stand in one another."""

KeyPath = tuple[object, ...]

_FLOAT_TAG = "tag:yaml.org,2002:float"
_NO_TEXT = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "timestamp", "binary"))
_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")

# What PyYAML says, and what the person who typed it needs to hear.
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
    """The text is no YAML that can be read; ``line`` counts from 1."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


@dataclass(frozen=True)
class YamlDocument:
    """Plain data, the line of every key path (the root's path is ``()``) and the keys given twice.

    ``lines`` has the keys as they are written. ``written`` has those that YAML reads as no text: by their paths with
    what pydantic calls such a key in the last place, ``"None"`` for ``null``, they as they are written.
    """

    data: Any
    lines: dict[KeyPath, int]
    duplicates: tuple[tuple[KeyPath, int, int], ...]
    written: dict[KeyPath, str] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """SafeLoader that also knows YAML 1.2's floats, and says in which line a value is that it cannot make.

    It stops at the first value that is too many or too deep: PyYAML takes most of a minute for a megabyte of them.
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
                str(made)  # what stands in base 16 or 60 may be longer than Python writes
            return made
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            # SafeLoader looks `!!bool x` up in a table, and takes the match of `!!timestamp x` for granted.
            given = str(node.value) if len(str(node.value)) <= 40 else f"{len(str(node.value))} characters"
            kind = node.tag.rpartition(":")[2]
            problem = f"a value that its YAML type {kind} does not allow ({given})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    r"""A string; JSON's ``"\ud83d\ude00"`` is one character, of which half is none that could be written again."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise yaml.constructor.ConstructorError(None, None, "half a surrogate pair", node.start_mark) from None


_Loader.add_constructor("tag:yaml.org,2002:str", _text)
_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))


def read_yaml(text: str) -> YamlDocument:
    """Reads one YAML document; an empty one has the data None.

    Raises:
        YamlError: the text is not YAML, or holds an alias that contains itself or stands for too much.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlDocument(None, {(): 1}, ())
        _check_size(node, [], {})
        keys = list(_keys(node))  # before construction, which puts merged keys beside those that replace them
        written = dict(_written(loader, node))
        data = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise _explained(error, text) from None
    except RecursionError:
        raise YamlError(1, "nested too deeply to be read") from None
    duplicates = tuple((path, line, first) for path, line, first in keys if first is not None)
    return YamlDocument(data, {(): _line(node)} | {path: line for path, line, _ in keys}, duplicates, written)


def _check_size(node: yaml.Node, above: list[yaml.Node], sizes: dict[int, int]) -> int:
    """How many values a node holds, those of its aliases and merges each time; kept in ``sizes``.

    Raises:
        YamlError: they are more than ``MOST_VALUES``, or an alias contains itself.
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
    """Each key and item below a node: its path, its line, and the line in which its mapping gave the key before."""
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
    """The key (None in a sequence), value and path of everything directly in ``node``."""
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
