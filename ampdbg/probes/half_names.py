"""Records which expressions on each source line hold half tensors while a step runs."""

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
"""Expressions that ampdbg can evaluate without running user code, if their parts are such expressions too."""

CONTAINERS = (list, tuple, torch.Tensor, torch.nn.ParameterList, torch.nn.ParameterDict)


@dataclass
class LineNames:
    """The source text of the expressions on one line that held half tensors, and of those that held wider floats."""

    half: dict[str, None] = field(default_factory=dict)
    full: dict[str, None] = field(default_factory=dict)


NamesByLine = Mapping[tuple[str, int], LineNames]
"""The expressions by file and line (from 1)."""


class CallNames:
    """Records which expressions on the user's lines hold half tensors, just before the line runs.

    ``seen`` has them by file and first line of the statement. Files that cannot be parsed are skipped.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], LineNames] = {}
        self._read: dict[str, Mapping[int, tuple[int, Mapping[str, ast.expr]]]] = {}

    def note(self, line: Line | None) -> None:
        """Record the line, or the user's caller of a library line. Call this inside a call on the line, before its op
        runs."""
        line = line.caller if isinstance(line, LibraryLine) else line
        if line is None or not is_users_file(line[0]):
            return
        for frame, number in walk_stack(sys._getframe(1)):
            if (frame.f_code.co_filename, number, frame.f_code.co_name) == line:
                self.note_frame(frame)
                return

    def note_frame(self, frame: FrameType) -> None:
        """Record the frame's current line; call this before the line runs."""
        file = frame.f_code.co_filename
        if file not in self._read:
            self._read[file] = _read_in(file)
        first, expressions = self._read[file].get(frame.f_lineno, (0, {}))
        for text, node in expressions.items():
            names, value = self.seen.setdefault((file, first), LineNames()), value_in(frame, node)
            with contextlib.suppress(Exception):  # a user's tensor class may refuse these calls
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    (names.half if value.dtype in HALVES else names.full)[text] = None


@contextlib.contextmanager
def names_seen(lines: Collection[tuple[str, int]]) -> Iterator[NamesByLine]:
    """Record the dtypes of names, attributes and constant elements in each function with one of ``lines``. Values are
    read in this thread, just before each line runs."""
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
    """Map each line of a file to the first line of its innermost statement, and to that statement's expressions."""
    try:
        nodes = [*ast.walk(syntax_tree(Path(file).read_bytes()))]
    except (OSError, *UNPARSABLE):
        return {}
    read: dict[int, tuple[int, dict[str, ast.expr]]] = {}
    for node in nodes:  # outer statements come before inner statements
        if isinstance(node, ast.stmt):
            read |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), (node.lineno, {}))
    for node in nodes:
        if isinstance(node, _PLAIN) and node.lineno in read:  # else it is a decorator at module level
            read[node.lineno][1][ast.unparse(node)] = node
    return read


def value_in(frame: FrameType, node: ast.AST) -> Any:
    """Return the value of a constant, a name, an attribute or an element in the frame.

    None if it has no value, or if reading it would compute something. Elements are read only from containers that store
    them.
    """
    with contextlib.suppress(Exception):  # an attribute or an element raises
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return frame.f_locals.get(name, frame.f_globals.get(name))
            case ast.Attribute(value=base, attr=name):
                return getattr(value_in(frame, base), name)
            case ast.Subscript(value=base, slice=ast.Constant() | ast.Name() as index):
                held, key = value_in(frame, base), value_in(frame, index)
                if isinstance(held, Mapping):
                    return held.get(key)  # held[key] would add an entry to a defaultdict
                return held[key] if isinstance(held, CONTAINERS) else None
    return None
