"""A source file that is checked or edited: its tree, the meaning of its names, and where each node is in the text.

The tree is Python's own, not LibCST's. For 20 kB of code LibCST's tree with its qualified names takes 0.4 s, and this
tree 0.02 s; a thousand files should take three seconds. An edit replaces pieces of text, so the rest of a file keeps
every byte.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, cast

from ampdbg.source.expressions import alternatives, is_none, method
from ampdbg.syntax_tree import syntax_tree

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Lambda, ast.Module)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
Scope = ast.AST
_Node = TypeVar("_Node", bound=ast.AST)

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)?")

HOMES = re.compile(r"(?<=\.amp\.)(?:autocast_mode|grad_scaler|common)\.")
"""The private modules from which torch.amp and torch.cuda.amp export."""


@dataclass(frozen=True)
class Span:
    """A piece of the text, as offsets in characters."""

    start: int
    end: int


class Document:
    """One file: its text, and its tree with every node's parent and scope.

    Raises:
        SyntaxError, ValueError, RecursionError: Python cannot parse the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = cast(ast.Module, syntax_tree(text))
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {self.tree: self.tree}
        self._kinds: dict[type[ast.AST], list[ast.AST]] = {}
        self._index()

    def _index(self) -> None:
        """Record the parent, scope and kind of every node, in the order of the text."""
        parents, scopes, kinds = self.parents, self.scopes, self._kinds
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            kind = type(node)
            kinds.setdefault(kind, []).append(node)
            scope = scopes[node]
            inner = node if kind in SCOPES else scope
            below = list(_below(node))
            for child in below:
                parents[child] = node
                scopes[child] = inner
            if inner is node and kind is not ast.Module:
                # Decorators and bases belong to the enclosing scope.
                outer = (*getattr(node, "decorator_list", ()), *getattr(node, "bases", ()))
                scopes.update(dict.fromkeys(outer, scope))
            stack.extend(reversed(below))

    def find(self, *kinds: type[_Node]) -> list[_Node]:
        """Return all nodes of the given kinds, in the order of the text."""
        found: list[_Node] = [node for kind in kinds for node in self._kinds.get(kind, ())]  # type: ignore[misc]
        return found if len(kinds) == 1 else sorted(found, key=_place)

    def loads(self) -> Iterator[ast.Name | ast.Attribute]:
        """Yield every name and attribute that is read."""
        yield from (node for node in self.find(ast.Name) if isinstance(node.ctx, ast.Load))
        yield from (node for node in self.find(ast.Attribute) if isinstance(node.ctx, ast.Load))

    @cached_property
    def definitions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
        """Every function and class."""
        return [*self.find(ast.FunctionDef), *self.find(ast.AsyncFunctionDef), *self.find(ast.ClassDef)]

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        return [*self.find(ast.Import), *self.find(ast.ImportFrom)]

    @cached_property
    def calls(self) -> list[ast.Call]:
        return self.find(ast.Call)

    def owners(self, *names: str) -> list[ast.expr]:
        """Return the expressions on which methods of the given names are called."""
        return [owner for call in self.calls if (owner := method(call, *names)) is not None]

    # Nodes around a node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first."""
        while (above := self.parents.get(node)) is not None:
            yield (node := above)

    def nearest(self, node: ast.AST, *kinds: type[_Node]) -> _Node | None:
        """Return the innermost node of the given kinds around a node."""
        return next((one for one in self.around(node) if isinstance(one, kinds)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is part of, or is."""
        return next(one for one in (node, *self.around(node)) if isinstance(one, ast.stmt))

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the innermost function around a node."""
        return self.nearest(node, ast.FunctionDef, ast.AsyncFunctionDef)  # type: ignore[return-value]

    def unit(self, node: ast.AST) -> ast.AST:
        """Return the innermost function around a node, else the module."""
        return self.function(node) or self.tree

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class around a node."""
        return self.nearest(node, ast.ClassDef)

    @cached_property
    def statements(self) -> dict[int, ast.stmt]:
        """The innermost statement on each line."""
        every = (node for node in ast.walk(self.tree) if isinstance(node, ast.stmt))
        return {line: one for one in every for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}

    def block(self, statement: ast.stmt) -> Sequence[ast.stmt]:
        """Return the statements of the block that a statement is in."""
        return self._blocks.get(statement, [statement])

    @cached_property
    def _blocks(self) -> dict[ast.AST, list[ast.stmt]]:
        lists = (value for node in ast.walk(self.tree) for _, value in ast.iter_fields(node) if isinstance(value, list))
        return {one: block for block in lists for one in block if isinstance(one, ast.stmt)}

    # The meaning of names

    @cached_property
    def _bindings(self) -> dict[Scope, dict[str, list[ast.AST]]]:
        """The binders of each name, by scope and name: imports, functions and classes, or assigned values."""
        bound: dict[Scope, dict[str, list[ast.AST]]] = {}
        globals_ = {(self.scopes[node], name) for node in self.find(ast.Global) for name in node.names}
        for node, name, binder in _bound(self):
            scope = self.scopes[node]
            scope = self.tree if (scope, name) in globals_ else scope
            bound.setdefault(scope, {}).setdefault(name, []).append(binder)
        return bound

    def home(self, name: ast.Name) -> Scope | None:
        """Return the scope that binds a name; None if the file has none. A class binds only for its own lines."""
        own = self.scopes[name]
        outer = (one for one in self.around(own) if isinstance(one, (*FUNCTIONS, ast.Lambda, ast.Module)))
        return next((scope for scope in (own, *outer) if name.id in self._bindings.get(scope, {})), None)

    def binders(self, name: ast.Name) -> list[ast.AST]:
        """Return the binders of a name in the scope that binds it."""
        home = self.home(name)
        return self._bindings[home][name.id] if home is not None else []

    def origin(self, node: ast.AST, depth: int = 4) -> str:
        """Return the imported object of a name: ``torch.cuda.amp.autocast`` for ``ac``; "" if none or several."""
        if isinstance(node, ast.Attribute):
            base = self.origin(node.value, depth)
            return canonical(f"{base}.{node.attr}") if base else ""
        if not isinstance(node, ast.Name) or not depth:
            return ""
        binders = self.binders(node)
        if not binders:
            return self._of_star(node.id)
        found = {self._origin_of(binder, node.id, depth - 1) for binder in binders}
        return next(iter(found)) if len(found) == 1 else _same(found)

    def _origin_of(self, binder: ast.AST, name: str, depth: int) -> str:
        if not isinstance(binder, ast.alias):
            return self.origin(binder, depth) if isinstance(binder, (ast.Name, ast.Attribute)) else ""
        line = self.parents[binder]
        if isinstance(line, ast.ImportFrom):
            return canonical(f"{'.' * line.level}{line.module or ''}.{binder.name}")
        return canonical(binder.name if binder.asname else name)

    def _of_star(self, name: str) -> str:
        """Return what ``from apex.fp16_utils import *`` may have bound; "" if several imports could have."""
        stars = [one.module or "" for one in self.find(ast.ImportFrom) if one.names[0].name == "*"]
        return f"{stars[0]}.{name}" if len(stars) == 1 and not hasattr(builtins, name) else ""

    def call_origin(self, node: ast.AST | None) -> str:
        """Return the origin of the called object; "" if the node is not a call."""
        return self.origin(node.func) if isinstance(node, ast.Call) else ""

    @cached_property
    def _attributes(self) -> dict[tuple[ast.ClassDef | None, str], list[ast.AST]]:
        """The values assigned to each attribute, by class and text: ``self.scaler``, ``args.scaler``."""
        found: dict[tuple[ast.ClassDef | None, str], list[ast.AST]] = {}
        for target, value in self.assigned():
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                found.setdefault(self._attribute_key(target), []).append(value)
        return found

    def assigned(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        """Yield every target of a plain assignment, and the value that is assigned to it."""
        for node in self.find(ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        for other in self.find(ast.AnnAssign):
            if other.value is not None:
                yield other.target, other.value

    def _attribute_key(self, node: ast.AST) -> tuple[ast.ClassDef | None, str]:
        text = ast.unparse(node)
        return (self.class_of(node) if text.startswith("self.") else None, text)

    def key(self, node: ast.AST) -> tuple[object, str]:
        """Return the key of a variable: its scope and its text."""
        if isinstance(node, ast.Name):
            return (self.home(node), node.id)
        return self._attribute_key(node)

    def values(self, node: ast.AST) -> list[ast.AST]:
        """Return every value that the file assigns to a name or an attribute, except None.

        Imports and parameters stay nodes. For an item that is never assigned, return the items of its list or dict.
        """
        found = (
            self.binders(node) if isinstance(node, ast.Name) else self._attributes.get(self._attribute_key(node), [])
        )
        if isinstance(node, ast.Subscript) and not found:
            made = [value for value in self.values(node.value) if isinstance(value, (ast.List, ast.Tuple, ast.Dict))]
            found = [item for one in made for item in (one.values if isinstance(one, ast.Dict) else one.elts)]
        return [value for one in found for value in alternatives(one) if not is_none(value)]

    def target(self, value: ast.AST) -> ast.expr | None:
        """Return the target of an assignment if it is the only one, and ``value`` is the whole right side."""
        match self.parents.get(value):
            case ast.Assign(targets=[target], value=whole) if whole is value:
                return target
        return None

    def last_value(self, name: ast.Name) -> ast.AST | None:
        """Return the value that every path last assigns to a name; None if that is not one statement."""
        below: ast.AST = self.statement(name)
        for outer in (below, *self.around(below)):
            if isinstance(outer, (*SCOPES, *LOOPS)) and outer is not below:
                return None
            if not isinstance(outer, ast.stmt):
                continue
            block = self.block(outer)
            before = reversed(block[: block.index(outer)])
            stores = ((one, node) for one in before for node in ast.walk(one) if isinstance(node, ast.Name))
            last = next(
                (one for one, node in stores if node.id == name.id and not isinstance(node.ctx, ast.Load)), None
            )
            if last is not None:
                is_alone = isinstance(last, ast.Assign) and name.id in [getattr(to, "id", "") for to in last.targets]
                return last.value if is_alone else None  # type: ignore[attr-defined]
        return None

    # Places in the text

    @cached_property
    def _starts(self) -> list[int]:
        starts, at = [0], 0
        for line in _LINE.findall(self.text):
            at += len(line)
            starts.append(at)
        return starts

    def offset(self, line: int, column: int) -> int:
        """Return the offset in the text of a line (from 1) and of Python's column, in bytes of UTF-8."""
        start, end = self._starts[line - 1], self._starts[min(line, len(self._starts) - 1)]
        text = self.text[start:end]
        return start + (column if text.isascii() else len(text.encode()[:column].decode(errors="ignore")))

    def span(self, node: ast.AST) -> Span:
        """Return the span of a node; of a function or class with its decorators."""
        first = min([node, *getattr(node, "decorator_list", ())], key=_place)
        start = self.offset(first.lineno, first.col_offset)
        start -= 1 if first is not node else 0  # the @
        end_line, end_column = node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return Span(start, self.offset(end_line, end_column))

    def source(self, node: ast.AST) -> str:
        span = self.span(node)
        return self.text[span.start : span.end]

    def spelled(self, node: ast.AST) -> str:
        """Return the source of an expression, on one line."""
        source = self.source(node)
        return ast.unparse(node) if "\n" in source else source

    @cached_property
    def lines_in_strings(self) -> frozenset[int]:
        """The offsets of the lines that begin inside of a string."""
        strings = (node for node in self.find(ast.Constant, ast.JoinedStr) if node.lineno != node.end_lineno)
        quoted = [node for node in strings if re.search("'''|\"\"\"", self.source(node))]
        return frozenset(at for node in quoted for at in self._starts[node.lineno : node.end_lineno])

    def column(self, node: ast.AST) -> int:
        """Return the column of a node in characters, from 1."""
        line: int = node.lineno  # type: ignore[attr-defined]
        column: int = node.col_offset  # type: ignore[attr-defined]
        return self.offset(line, column) - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """Return a line without its end."""
        return self.text[self._starts[number - 1] : self._starts[min(number, len(self._starts) - 1)]].rstrip("\r\n")

    def lines(self, node: ast.AST) -> Span:
        """Return the span of a node's whole lines, with the last line's end; no other code may share them."""
        first = min([node, *getattr(node, "decorator_list", ())], key=_place)
        return Span(self._starts[first.lineno - 1], self._starts[node.end_lineno])  # type: ignore[attr-defined]

    def has_own_lines(self, first: ast.stmt, last: ast.stmt | None = None) -> bool:
        """True if only comments share the lines of a statement, or of the statements from ``first`` to ``last``."""
        end = last or first
        behind = self.text[self.span(end).end : self.lines(end).end].strip()
        before = self.text[self.lines(first).start : self.span(first).start]
        return not before.strip() and (not behind or behind.startswith("#"))

    def indent(self, node: ast.stmt) -> str:
        """Return the indentation of a statement that begins its line."""
        text = self.line(node.lineno)
        return text[: len(text) - len(text.lstrip())]

    def indent_unit(self, statement: ast.stmt) -> str:
        """Return the indentation of a statement beyond that of the statement around it; the usual one if at the top."""
        around = self.nearest(statement, ast.stmt)
        if around is None or isinstance(around, ast.Match):  # the case stands between
            return self.default_indent
        return self.indent(statement)[len(self.indent(around)) :]

    @cached_property
    def default_indent(self) -> str:
        """The indentation of the first indented line."""
        found = re.search(r"(?m)^([ \t]+)\S", self.text)
        return found[1] if found else "    "

    @cached_property
    def newline(self) -> str:
        """The line ending of the file."""
        found = re.search(r"\r\n|\r|\n", self.text)
        return found[0] if found else "\n"


def _place(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}
"""The fields that may hold nodes, by kind of node; without contexts and operators, which all nodes share."""


def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(name for name in kind._fields if name not in ("ctx", "op", "ops", "id", "attr", "arg"))
    return _FIELDS[kind]


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the same nodes as ``ast.iter_child_nodes``, in half the time."""
    for name in _fields(type(node)):
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            yield value
        elif isinstance(value, list):
            yield from (one for one in value if isinstance(one, ast.AST))


def _bound(document: Document) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield every binding: a node of the scope, the name, and its binder."""
    for node in document.imports:
        for alias in node.names:
            yield node, alias.asname or alias.name.partition(".")[0], alias
    for made in document.definitions:
        yield made, made.name, made
    for argument in document.find(ast.arg):
        yield argument, argument.arg, argument
    assigned = [(target, value) for target, value in document.assigned() if isinstance(target, ast.Name)]
    plain = {id(target) for target, _ in assigned}
    yield from ((target, target.id, value) for target, value in assigned)
    others = (name for name in document.find(ast.Name) if isinstance(name.ctx, ast.Store) and id(name) not in plain)
    yield from ((name, name.id, name) for name in others)  # bound by a loop, a with, +=, :=


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Split ``a, b = x, y`` into two assignments; assign the whole value to any other unpacked target."""
    if isinstance(target, (ast.Tuple, ast.List)):
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        if len(values) != len(target.elts):
            values = [value] * len(target.elts)
        for one, its in zip(target.elts, values, strict=True):
            yield from _pairs(one, its)
    else:
        yield target, value


def canonical(origin: str) -> str:
    """Return the public name of an object in a private module of torch."""
    return HOMES.sub("", origin)


def _same(found: set[str]) -> str:
    """Return the one object that origins name in different torch versions, else ""; a fallback of None is ignored."""
    known = {one for one in found if one}
    last = {one.rpartition(".")[2] for one in known}
    return max(known, key=len) if len(last) == 1 and all(".amp." in one for one in known) else ""
