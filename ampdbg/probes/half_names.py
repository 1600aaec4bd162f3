"""Which expressions hold half tensors on each line of a function, as seen while a step runs."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from ampdbg.probes.source_lines import tracing
from ampdbg.probes.tensors import HALVES
from ampdbg.source.ownership import LibraryLine, Line, is_users_file
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

_PLAIN = (ast.Name, ast.Attribute, ast.Subscript)
"""Expressions that can be looked at without running any code of the user's, if what they are made of is."""

CONTAINERS = (list, tuple, torch.Tensor, torch.nn.ParameterList, torch.nn.ParameterDict)


@dataclass
class LineNames:
    """The expressions of one line, as they stand in the source, that held half tensors and other float tensors."""

    half: dict[str, None] = field(default_factory=dict)
    full: dict[str, None] = field(default_factory=dict)


NamesByLine = Mapping[tuple[str, int], LineNames]
"""By file and line (from 1)."""


class CallNames:
    """Notes the names of each line of the user's code that calls what is noted; ``seen`` has them by its statement.

    Values are looked at before what a line calls is run. Code that cannot be parsed is passed over.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], LineNames] = {}
        self._read: dict[str, Mapping[int, tuple[int, Mapping[str, ast.expr]]]] = {}

    def note(self, line: Line | None) -> None:
        """To be called below the line, before what it calls is run; of a library's it is that which led there."""
        line = line.caller if isinstance(line, LibraryLine) else line
        if line is None or not is_users_file(line[0]):
            return
        for frame, number in walk_stack(sys._getframe(1)):
            if (frame.f_code.co_filename, number, frame.f_code.co_name) == line:
                self.note_frame(frame)
                return

    def note_frame(self, frame: FrameType) -> None:
        """To be called before the line of a frame is run."""
        file = frame.f_code.co_filename
        if file not in self._read:
            self._read[file] = _read_in(file)
        first, expressions = self._read[file].get(frame.f_lineno, (0, {}))
        for text, node in expressions.items():
            _note(self.seen.setdefault((file, first), LineNames()), text, node, frame)


@contextlib.contextmanager
def names_seen(lines: Collection[tuple[str, int]]) -> Iterator[NamesByLine]:
    """Notes the dtypes of names, attributes and constant elements in every function that holds one of ``lines``, just
    before each line runs, in this thread."""
    names, files = CallNames(), {file for file, _ in lines}

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            names.note_frame(frame)
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        is_wanted = code.co_filename in files and any((code.co_filename, line) in lines for *_, line in code.co_lines())
        return on_line if is_wanted else None

    with tracing(on_call):
        yield names.seen


def _read_in(file: str) -> Mapping[int, tuple[int, Mapping[str, ast.expr]]]:
    """Of each line of a file the first of its innermost statement, and what of that can be looked at."""
    try:
        nodes = [*ast.walk(syntax_tree(Path(file).read_bytes()))]
    except (OSError, *UNPARSABLE):
        return {}
    read: dict[int, tuple[int, dict[str, ast.expr]]] = {}
    for node in nodes:  # an outer one is met before those in it
        if isinstance(node, ast.stmt):
            read |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), (node.lineno, {}))
    for node in nodes:
        if isinstance(node, _PLAIN) and node.lineno in read:  # else it decorates a function of the module
            read[node.lineno][1][ast.unparse(node)] = node
    return read


def _note(names: LineNames, text: str, node: ast.expr, frame: FrameType) -> None:
    try:
        value = _value_of(node, frame)
    except Exception:  # noqa: BLE001
        # Not there yet on this line, or an attribute that raises: then it holds nothing here.
        return
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        (names.half if value.dtype in HALVES else names.full)[text] = None


def _value_of(node: ast.expr, frame: FrameType) -> Any:
    """What an expression holds; only containers whose elements come without any computation are looked into. None of
    what would have to be computed."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals[name] if name in frame.f_locals else frame.f_globals[name]
        case ast.Attribute(value=base, attr=name):
            return getattr(_value_of(base, frame), name)
        case ast.Subscript(value=base, slice=ast.Constant() | ast.Name() as index):
            held: Any = _value_of(base, frame)
            key: Any = index.value if isinstance(index, ast.Constant) else _value_of(index, frame)
            if isinstance(held, Mapping):
                return held.get(key)  # a defaultdict would get an entry of its own by being asked
            return held[key] if isinstance(held, CONTAINERS) else None
    return None
