"""Records which expressions on each source line hold half tensors while a step runs."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
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
"""Expressions that ampdbg can evaluate without running user code, if their parts are such expressions too.

Other expressions have a known value only as arguments of a call, which the callee's parameters hold."""

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
        callee = sys._getframe(1)
        for frame, number in walk_stack(callee):
            if (frame.f_code.co_filename, number, frame.f_code.co_name) == line:
                self.note_frame(frame)
                self.note_call(callee)
                return
            callee = frame

    def note_frame(self, frame: FrameType) -> None:
        """Record the frame's current line; call this before the line runs."""
        first, expressions = self._on_line_of(frame)
        for text, node in expressions.items():
            self._note((frame.f_code.co_filename, first), text, value_in(frame, node))

    def note_call(self, callee: FrameType) -> None:
        """Record the arguments of the call on a line that began this frame; call this while it has them."""
        caller = callee.f_back
        assert caller is not None
        first, expressions = self._on_line_of(caller)
        calls = [node for node in expressions.values() if isinstance(node, ast.Call)]
        often = Counter(ast.unparse(call.func) for call in calls)
        for call in (one for one in calls if often[ast.unparse(one.func)] == 1):
            with contextlib.suppress(Exception):  # a user's class may refuse to be asked for its attributes
                for argument, value in _arguments_in(callee, call, value_in(caller, call.func)):
                    self._note((caller.f_code.co_filename, first), ast.unparse(argument), value)

    def _on_line_of(self, frame: FrameType) -> tuple[int, Mapping[str, ast.expr]]:
        file = frame.f_code.co_filename
        if file not in self._read:
            self._read[file] = _read_in(file)
        return self._read[file].get(frame.f_lineno, (0, {}))

    def _note(self, place: tuple[str, int], text: str, value: Any) -> None:
        names = self.seen.setdefault(place, LineNames())
        with contextlib.suppress(Exception):  # a user's tensor class may refuse these calls
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                (names.half if value.dtype in HALVES else names.full)[text] = None


def _arguments_in(frame: FrameType, call: ast.Call, called: Any) -> Iterator[tuple[ast.expr, Any]]:
    """Yield the arguments before any star and their values, if the call of ``called`` began the frame."""
    names, star, stars, held = inspect.getargvalues(frame)
    values = [*(held.get(name) for name in names), *held.get(star or "", ())]
    owner = getattr(called, "__self__", called)  # a method's object; a module is called with itself
    is_bound = owner is not None and any(value is owner for value in values[:1])
    if is_bound or getattr(called, "__code__", None) is frame.f_code:
        plain = takewhile(lambda argument: not isinstance(argument, ast.Starred), call.args)
        yield from zip(plain, values[is_bound:], strict=False)
        named = {**held, **held.get(stars or "", {})}
        yield from ((keyword.value, named.get(keyword.arg)) for keyword in call.keywords)


@contextlib.contextmanager
def names_seen(lines: Collection[tuple[str, int]]) -> Iterator[NamesByLine]:
    """Record the dtypes of names, attributes and constant elements in each function with one of ``lines``. Values are
    read in this thread, just before each line runs, and those of arguments as each call begins."""
    names, files = CallNames(), {file for file, _ in lines}

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            names.note_frame(frame)
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        code, caller = frame.f_code, frame.f_back
        if caller is not None and (caller.f_code.co_filename, caller.f_lineno) in lines:
            names.note_call(frame)
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
        if isinstance(node, (*_PLAIN, ast.Call)) and node.lineno in read:  # else it is a decorator at module level
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
