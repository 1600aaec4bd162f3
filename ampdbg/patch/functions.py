"""The functions of modules' classes as they are written in files: which of them run, where, and what they call."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import torch

from ampdbg.patch.edits import LinePin
from ampdbg.source.ownership import is_users_file
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFunction:
    """A function in a file. ``line`` is its first one, that of a decorator where it has any."""

    file: str
    qualname: str
    line: int

    @property
    def class_name(self) -> str:
        """The class that it is written in; "" for a plain function."""
        return ".".join(self.qualname.split(".")[-2:-1])


def written(value: object) -> SourceFunction | None:
    """A method, property or decorated function of a class as its author wrote it; None for anything else."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    function = inspect.unwrap(value) if callable(value) else None
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    return SourceFunction(code.co_filename, function.__qualname__, code.co_firstlineno)


def functions_run(kind: type, name: str) -> Iterator[SourceFunction]:
    """What a class runs as its method ``name``: its own or inherited one, and those that this calls by ``super()``."""
    for owner in kind.__mro__:
        if name in vars(owner):
            found = written(vars(owner)[name])
            node = node_of(found) if found is not None else None
            if found is None or node is None:
                return
            yield found
            if not _calls_above(node, name):
                return


def _calls_above(node: FunctionNode, name: str) -> bool:
    """Whether a method calls that of a class above: ``super().forward(x)``, ``Block.forward(self, x)``."""
    named = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and part.attr == name)
    return any(_root(part) != _self_of(node) for part in named)


def call_of(module: str, model: torch.nn.Module) -> tuple[SourceFunction, LinePin] | None:
    """The ``forward`` of a module's parent, where that is the user's own code, and the calls of the module there.

    None where that forward reaches the module in another way: in a loop, through another method or function.
    """
    parent, _, child = module.rpartition(".")
    if not child:
        return None
    for function in functions_run(type(model.get_submodule(parent)), "forward"):
        node = node_of(function) if is_users_file(function.file) else None
        callee = f"{_self_of(node)}.{child}" if node is not None else ""
        lines = {part.lineno for part in _own(node) if isinstance(part, ast.Call) and ast.unparse(part.func) == callee}
        if lines:
            return function, LinePin(function.qualname, tuple(sorted(lines)), callee)
    return None


def modules_running(function: SourceFunction, model: torch.nn.Module) -> tuple[str, ...]:
    """The names of all modules whose class runs this method, and not one of its own in its place."""
    name = function.qualname.rpartition(".")[2]
    named = [(path, type(module)) for path, module in model.named_modules()]
    kinds = {kind for _, kind in named if function in functions_run(kind, name)}
    return tuple(path for path, kind in named if kind in kinds)


def function_at(file: str, line: int) -> SourceFunction | None:
    """The innermost named function that holds a line."""
    found = [(function, node) for function, node in _functions(file) if function.line <= line <= (node.end_lineno or 0)]
    return max(found, key=lambda item: item[0].line)[0] if found else None


def node_of(function: SourceFunction) -> FunctionNode | None:
    """The function as its file has it; None where that is no file, or none that parses, or another by now."""
    name = function.qualname.rpartition(".")[2]
    at_line = (node for other, node in _functions(function.file) if other.line == function.line and node.name == name)
    return next(at_line, None)


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _self_of(node: FunctionNode) -> str:
    """The name of the first parameter."""
    return next((item.arg for item in (*node.args.posonlyargs, *node.args.args)), "")


def _own(node: ast.AST | None) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions in it."""
    for child in ast.iter_child_nodes(node) if node is not None else ():
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _own(child)


def _functions(file: str) -> Sequence[tuple[SourceFunction, FunctionNode]]:
    """The functions of a file as it is now; none where it cannot be read or parsed."""
    try:
        return _functions_of(file, Path(file).read_bytes())
    except (OSError, *UNPARSABLE):
        return ()


@functools.lru_cache(maxsize=32)
def _functions_of(file: str, source: bytes) -> Sequence[tuple[SourceFunction, FunctionNode]]:
    return tuple(_functions_in(syntax_tree(source), file, ""))


def _functions_in(node: ast.AST, file: str, around: str) -> Iterator[tuple[SourceFunction, FunctionNode]]:
    for child in ast.iter_child_nodes(node):
        inner = around
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield SourceFunction(file, around + child.name, first), child
            inner = f"{around}{child.name}.<locals>."
        elif isinstance(child, ast.ClassDef):
            inner = f"{around}{child.name}."
        yield from _functions_in(child, file, inner)
