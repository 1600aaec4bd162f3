"""A patch in force in the live process: its functions temporarily run the patched code."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ampdbg.patch.file_edits import counterpart
from ampdbg.quantities import counted
from ampdbg.source.ownership import codes_within
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

Changed = Mapping[int, str]
"""The names of changed functions, by the ``id`` of their new code."""


class CannotSwapError(Exception):
    """The reason why a patch cannot be put in force in a process that has already imported the files."""


@contextlib.contextmanager
def swapped(files: Mapping[Path, bytes]) -> Iterator[Changed]:
    """Run the patched code in the functions of these files until the context exits.

    Running calls, such as a script's loop, continue with their old code. Callers must check that the changed functions
    are called again. The new code has the line numbers of the files, and 0 for lines that only the patch has.

    Raises:
        CannotSwapError: the patch changes more than function bodies and imports.
    """
    changed: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        for path, after in files.items():
            every = (one for one in gc.get_objects() if type(one) is FunctionType)
            named = (one for one in every if one.__code__.co_filename.endswith(path.name))
            functions = [one for one in named if os.path.realpath(one.__code__.co_filename) == os.path.realpath(path)]
            names = {one.__code__.co_filename for one in functions}
            if len(names) != 1:
                raise CannotSwapError(f"{path.name} is imported under {counted(len(names), 'name')}")
            changed |= stack.enter_context(_in_force(names.pop(), path, after, functions))
        yield changed


CodePlace = tuple[str, int]
"""A function by its code's name and first line, including decorators."""


class _Read(NamedTuple):
    """A file: the statements that run on import, and the bodies of its functions without nested functions."""

    outside: list[ast.stmt]
    bodies: dict[CodePlace, str]
    codes: dict[CodePlace, CodeType]


def _read(source: bytes, name: str, line_of: Callable[[int], int]) -> _Read:
    tree: Any = syntax_tree(source)
    nodes: list[Any] = list(ast.walk(tree))
    for node in nodes:
        if hasattr(node, "lineno"):
            line, end = line_of(node.lineno), line_of(node.end_lineno or node.lineno)
            vars(node).update(lineno=line, end_lineno=max(line, end), col_offset=0, end_col_offset=0)
    every = codes_within(compile(tree, name, "exec", dont_inherit=True))
    codes, bodies = {(one.co_name, one.co_firstlineno): one for one in every}, {}
    for node in reversed(nodes):  # inner functions before outer functions
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            bodies[node.name, first] = "".join(map(ast.dump, node.body))
            node.body = []
    return _Read(tree.body, bodies, codes)


@contextlib.contextmanager
def _in_force(name: str, path: Path, after: bytes, functions: list[FunctionType]) -> Iterator[Changed]:
    try:
        before = path.read_bytes()
        old = _read(before, name, int)
        new = _read(after, name, functools.cache(lambda line: counterpart(line, after, before)))
    except (OSError, *UNPARSABLE) as error:
        raise CannotSwapError(f"{path.name} cannot be read or parsed: {error}") from None
    known = list(map(ast.dump, old.outside))
    added = [one for one in new.outside if isinstance(one, (ast.Import, ast.ImportFrom)) and ast.dump(one) not in known]
    if known != [ast.dump(one) for one in new.outside if one not in added] or old.bodies.keys() - new.bodies.keys():
        raise CannotSwapError(f"it changes code that runs when {path.name} is imported")
    swaps = list(_swaps(old, new, functions))
    with contextlib.ExitStack() as stack:
        for space in {id(one.__globals__): one.__globals__ for one, *_ in swaps}.values():
            bound = dict(space)
            exec(compile(ast.Module(list(added), []), name, "exec", dont_inherit=True), bound)
            stack.enter_context(_items(space, {key: one for key, one in bound.items() if space.get(key) is not one}))
        try:
            for one, _, code in swaps:
                one.__code__ = code
            yield {id(new.codes[place]): place[0] for place, body in old.bodies.items() if new.bodies[place] != body}
        finally:
            for one, code, _ in swaps:
                one.__code__ = code


def _swaps(old: _Read, new: _Read, functions: list[FunctionType]) -> Iterator[tuple[FunctionType, CodeType, CodeType]]:
    """Yield each function with the file's current code, its code and its patched code."""
    for one in functions:
        code, place = one.__code__, (one.__code__.co_name, one.__code__.co_firstlineno)
        if place in old.bodies and code.co_code == old.codes[place].co_code:
            if code.co_freevars != new.codes[place].co_freevars:
                raise CannotSwapError(f"{one.__qualname__} uses other names of its enclosing function")
            yield one, code, new.codes[place]


@contextlib.contextmanager
def _items(space: dict[str, Any], items: Mapping[str, Any]) -> Iterator[None]:
    """Give the dict these items until the context exits."""
    before = {key: space[key] for key in items if key in space}
    try:
        space.update(items)
        yield
    finally:
        for key in items:
            space.pop(key, None)
        space.update(before)
