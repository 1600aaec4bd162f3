"""LibCST expressions: their canonical text, the names they read and assign, and the bindings of a function."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import libcst as cst

from ampdbg.syntax_tree import syntax_tree

_EMPTY = cst.Module([])
_Node = TypeVar("_Node", bound=cst.CSTNode)

SCOPES = (cst.FunctionDef, cst.ClassDef, cst.Lambda)
COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)


Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement

# Import sections: `from __future__`, standard library, installed packages, own package, and non-imports.
_FUTURE, _STANDARD, _INSTALLED, _OWN, _OTHER = range(5)


def imports_of(body: Iterable[cst.CSTNode]) -> dict[str, str]:
    """Map the local names that the imports in ``body`` bind to dotted names: ``F`` to torch.nn.functional.

    Imports inside ``if`` and ``try`` count (``if is_torch_available():``), except under ``TYPE_CHECKING``.
    """
    bound: dict[str, str] = {}
    for line in body:
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            bound.update(_imported(statement))
        if isinstance(line, cst.If) and dotted(line.test).rpartition(".")[2] == "TYPE_CHECKING":
            continue
        if isinstance(line, (cst.Try, cst.If)):
            bound.update(imports_of(line.body.body))
    return bound


def _imported(statement: cst.BaseSmallStatement) -> Iterator[tuple[str, str]]:
    if isinstance(statement, cst.Import):
        for alias in statement.names:
            name = alias.evaluated_name
            # `import torch.nn` binds torch; `import torch.nn as nn` binds torch.nn.
            yield (alias.evaluated_alias, name) if alias.evaluated_alias else (name.partition(".")[0],) * 2
    elif isinstance(statement, cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
        origin = "." * len(statement.relative) + (dotted(statement.module) if statement.module else "")
        for alias in statement.names:
            yield alias.evaluated_alias or alias.evaluated_name, f"{origin}.{alias.evaluated_name}"


def dotted(node: cst.BaseExpression) -> str:
    """Return ``a.b.c`` as text, or "" if the expression is not made of names and dots."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=base, attr=cst.Name(value=name)) if owner := dotted(base):
            return f"{owner}.{name}"
    return ""


def keyword_of(arg: cst.Arg) -> str:
    """Return the keyword of an argument, or "" for a positional one."""
    return arg.keyword.value if arg.keyword is not None else ""


def origin_of(name: str, imports: Mapping[str, str]) -> str:
    """Return the full name of an imported dotted name (torch.nn.functional.softmax for ``F.softmax``), or ""."""
    first, dot, rest = name.partition(".")
    return f"{imports[first]}{dot}{rest}" if first in imports else ""


def disables_autocast(node: cst.CSTNode, imports: Mapping[str, str]) -> bool:
    """True if the node is an ``autocast(…, enabled=False)`` call, a ``with`` of one, or a function decorated by one.

    Any import name counts, and so does ``torch.cuda.amp.autocast``.
    """
    match node:
        case cst.With(items=managers):
            return any(disables_autocast(manager.item, imports) for manager in managers)
        case cst.FunctionDef(decorators=decorators):
            return any(disables_autocast(each.decorator, imports) for each in decorators)
        case cst.Call(func=function, args=args):
            origin = origin_of(dotted(function), imports) or dotted(function)
            off = {keyword_of(arg) for arg in args if dotted(arg.value) == "False"}
            return "enabled" in off and origin.startswith("torch.") and origin.endswith("autocast")
    return False


def with_imported(module: cst.Module, name: str) -> cst.Module:
    """Return the module with ``import NAME`` in its conventional place, or unchanged if it has that import.

    LibCST's AddImportsVisitor appends the import after all others, which breaks the order that linters require.
    """
    if imports_of(module.body).get(name) == name:
        return module
    line = cst.SimpleStatementLine([cst.Import([cst.ImportAlias(cst.Name(name))])])
    body: list[Statement] = list(module.body)
    section, first = _rank(line)[0], int(module.get_docstring() is not None)
    place = next((index for index in range(first, len(body)) if _rank(body[index]) >= _rank(line)), len(body))
    if place < len(body) and _rank(body[place])[0] == section:  # keep the lines above that import above the new one
        line = line.with_changes(leading_lines=body[place].leading_lines)
        body[place] = body[place].with_changes(leading_lines=())
    body.insert(place, line)
    for index, (above, below) in enumerate(itertools.pairwise(body), 1):
        if index in (place, place + 1) and _rank(above)[0] != _rank(below)[0]:
            body[index] = apart(below, 1)
    return module.with_changes(body=body)


def _rank(line: cst.CSTNode) -> tuple[int, bool, str]:
    """Return the sort key of an import: section, ``import`` before ``from``, name. Other statements sort last."""
    root, is_from = "", False
    match line:
        case cst.SimpleStatementLine(body=[cst.Import(names=[first, *_]), *_]):
            root = first.evaluated_name.partition(".")[0]
        case cst.SimpleStatementLine(body=[cst.ImportFrom(relative=[_, *_]), *_]):
            root, is_from = ".", True
        case cst.SimpleStatementLine(body=[cst.ImportFrom(module=cst.BaseExpression() as module), *_]):
            root, is_from = dotted(module).partition(".")[0], True
    standard = _STANDARD if root in sys.stdlib_module_names else _INSTALLED
    return {"": _OTHER, "__future__": _FUTURE, ".": _OWN}.get(root, standard), is_from, root


def apart(statement: Statement, count: int) -> Statement:
    """Return the statement with at least ``count`` blank lines above it and its comments."""
    lines = statement.leading_lines
    blank = next((index for index, line in enumerate(lines) if line.comment is not None), len(lines))
    missing = [cst.EmptyLine(indent=False)] * (count - min(blank, count))
    return statement.with_changes(leading_lines=[*missing, *lines])


@functools.lru_cache(maxsize=4096)
def canonical(code: str) -> str:
    """Normalize the spacing, outer parentheses and quotes of an expression."""
    try:
        # In parentheses, because the expression may span several lines.
        return ast.unparse(syntax_tree(f"({code.strip()}\n)", mode="eval"))
    except SyntaxError:
        return code


def code_of(node: cst.BaseExpression) -> str:
    """Return the canonical text of an expression."""
    return node.value if isinstance(node, cst.Name) else canonical(_EMPTY.code_for_node(node))


def spelled(node: cst.BaseExpression) -> str:
    """Return an expression as the source spells it, on one line and without outer parentheses."""
    text = _EMPTY.code_for_node(bare(node))
    return code_of(node) if "\n" in text else text


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the node and its descendants in source order, parents first."""
    yield node
    for child in node.children:
        yield from walk(child)


def find(node: cst.CSTNode, kind: type[_Node]) -> Iterator[_Node]:
    """Yield all nodes of one kind, including the node itself."""
    return (item for item in walk(node) if isinstance(item, kind))


def names_read(node: cst.CSTNode) -> set[str]:
    """Return every name in an expression or statement, except attribute and keyword names."""
    hidden = {id(item.attr) for item in find(node, cst.Attribute)}
    hidden |= {id(item.keyword) for item in find(node, cst.Arg) if item.keyword is not None}
    return {name.value for name in find(node, cst.Name) if id(name) not in hidden}


def names_assigned(node: cst.CSTNode) -> set[str]:
    """Return every plain name that a statement binds, including in nested functions."""
    binding = (item for item in walk(node) if type(item) in BINDS)
    return {name for item in binding for name in _names_in(getattr(item, BINDS[type(item)]))}


def assigned_codes(statement: cst.CSTNode) -> set[str]:
    """Return the assigned names of a statement, and the canonical text of assigned attributes and subscripts."""
    parts = (target for target in targets(statement) if isinstance(target, (cst.Attribute, cst.Subscript)))
    return names_assigned(statement) | set(map(code_of, parts))


def targets(statement: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """Yield the targets of ``=``, annotated and augmented assignments."""
    kinds = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign)
    return (item.target for item in walk(statement) if isinstance(item, kinds))


BINDS: Mapping[type[cst.CSTNode], str] = {
    **dict.fromkeys(
        (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.CompFor, cst.Del), "target"
    ),
    **dict.fromkeys((cst.FunctionDef, cst.ClassDef, cst.Param, cst.ExceptHandler), "name"),
    cst.WithItem: "asname",
}
"""Maps each kind of node that binds names to its attribute that holds them."""


def _names_in(target: cst.CSTNode | None) -> Iterator[str]:
    match target:
        case cst.Name(value=name):
            yield name
        case cst.AsName(name=inner):
            yield from _names_in(inner)
        case cst.Tuple(elements=elements) | cst.List(elements=elements):
            for element in elements:
                yield from _names_in(element.value)


def bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the expression without its parentheses."""
    return node.with_changes(lpar=(), rpar=()) if getattr(node, "lpar", ()) else node


METADATA = frozenset(
    """shape dtype device ndim size dim numel nelement stride layout names is_cuda is_floating_point is_contiguous
    is_complex requires_grad requires_grad_ element_size item tolist grad grad_fn is_leaf get_device""".split()
)
"""Tensor members that describe a tensor. They are the same in half and FP32, and ``dtype`` keeps its meaning."""

TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
"""Tensor attributes that return a transposed view."""

PLAIN_MODULES = frozenset("math operator itertools functools typing warnings collections einops cmath numbers".split())
"""Modules with functions that never run user code."""

_NUMBER_MAKERS = frozenset({"len", "int", "float", "bool", "range", "round"})


@dataclass(frozen=True)
class Bindings:
    """The names of one function, or of module-level code if ``function`` is None."""

    module: cst.Module
    function: cst.FunctionDef | None

    @property
    def scope(self) -> cst.CSTNode:
        """The code to which the names belong."""
        return self.module if self.function is None else self.function.body

    @cached_property
    def imports(self) -> Mapping[str, str]:
        """Imports at the top of the module and in the function."""
        own = self.function.body.body if self.function is not None else ()
        return {**imports_of(self.module.body), **imports_of(own)}

    def origin(self, node: cst.BaseExpression) -> str:
        """Return the full name of an imported function (torch.nn.functional.softmax for ``F.softmax``), or "".

        If a variable holds one of several functions, return any: ``conv = F.conv2d if x.ndim == 4 else F.conv3d``.
        """
        name = dotted(node)
        return origin_of(name, self.imports) or self._functions.get(name, "")

    @cached_property
    def _functions(self) -> Mapping[str, str]:
        """Maps each variable that only holds imported functions of one module to one such function."""
        held: dict[str, list[str]] = {name: [""] for name in self.parameters}
        for names, value in self._assignments():
            for name in names:
                held.setdefault(name, []).extend(origin_of(dotted(one), self.imports) for one in _alternatives(value))
        modules = {name: {origin.rpartition(".")[0] for origin in origins} for name, origins in held.items()}
        return {name: origins[0] for name, origins in held.items() if len(modules[name]) == 1 and origins[0]}

    @cached_property
    def parameters(self) -> Mapping[str, cst.Param]:
        if self.function is None:
            return {}
        given = self.function.params
        return {item.name.value: item for item in (*given.posonly_params, *given.params, *given.kwonly_params)}

    @cached_property
    def local(self) -> frozenset[str]:
        """The parameters and every name that the function assigns."""
        bound = set(self.parameters) | names_assigned(self.scope)
        if self.function is not None:
            stars = (self.function.params.star_arg, self.function.params.star_kwarg)
            bound |= {star.name.value for star in stars if isinstance(star, cst.Param)}
        return frozenset(bound)

    @cached_property
    def taken(self) -> frozenset[str]:
        """Names that are unavailable for a new variable."""
        return frozenset(
            names_read(self.scope) | self.local | names_assigned(self.module) | set(self.imports) | set(dir(builtins))
        )

    def may_assign(self, name: str) -> bool:
        """True if an assignment to the name stays in the function: the name is local to it, or new."""
        return self.function is None or name in self.local or name not in self.taken

    @cached_property
    def maybe_plain_values(self) -> frozenset[str]:
        """Names that may hold a number: ``total = 0``, ``scale=1.0``, a loop index."""
        return self._may_hold(is_plain_value)

    @cached_property
    def maybe_none(self) -> frozenset[str]:
        return self._may_hold(lambda value: isinstance(value, cst.Name) and value.value == "None")

    def _may_hold(self, is_one: Callable[[cst.BaseExpression], bool]) -> frozenset[str]:
        """Return the names with a default or assigned value that ``is_one`` accepts, even in one branch only."""
        found = {name for name, item in self.parameters.items() if any(map(is_one, _alternatives(item.default)))}
        assigned = (names for names, value in self._assignments() if any(map(is_one, _alternatives(value))))
        return frozenset(found.union(*assigned))

    def _assignments(self) -> Iterator[tuple[set[str], cst.BaseExpression]]:
        yield from ((names_assigned(item), item.value) for item in find(self.scope, cst.Assign))
        yield from ((set(_names_in(item.target)), item.iter) for item in find(self.scope, cst.For))


def _alternatives(value: cst.BaseExpression | None) -> Iterator[cst.BaseExpression]:
    """Yield the possible values of an expression: both branches of a conditional."""
    if isinstance(value, cst.IfExp):
        yield from (*_alternatives(value.body), *_alternatives(value.orelse))
    elif value is not None:
        yield value


def is_plain_value(value: cst.BaseExpression) -> bool:
    """True for ``x.shape[1]``, ``x.size(0)``, ``len(xs)``, ``2``, and arithmetic on such values."""
    match value:
        case cst.Integer() | cst.Float() | cst.BaseString():
            return True
        case cst.UnaryOperation(expression=inner) | cst.Subscript(value=inner):
            return is_plain_value(inner)
        case cst.BinaryOperation():
            return is_plain_value(value.left) and is_plain_value(value.right)
        case cst.Attribute():
            return value.attr.value in METADATA
        case cst.Call(func=cst.Name() as function):
            return function.value in _NUMBER_MAKERS
        case cst.Call(func=cst.Attribute() as method):
            return method.attr.value in METADATA or dotted(method).startswith("math.")
    return False
