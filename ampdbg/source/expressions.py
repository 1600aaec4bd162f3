"""LibCST expressions: their canonical text, what they read and assign, and what the names of a function mean."""

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

# `from __future__`, the standard library, installed packages, the package's own, and what is no import.
_FUTURE, _STANDARD, _INSTALLED, _OWN, _OTHER = range(5)


def imports_of(body: Iterable[cst.CSTNode]) -> dict[str, str]:
    """What the import statements among ``body`` bind: local name to dotted name, ``F`` to torch.nn.functional.

    Those in an ``if`` or ``try`` count (``if is_torch_available():``), but for what is there for types alone.
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
    """``a.b.c`` as text; "" for anything that is not names and dots."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=base, attr=cst.Name(value=name)) if owner := dotted(base):
            return f"{owner}.{name}"
    return ""


def keyword_of(arg: cst.Arg) -> str:
    """The name that an argument is given by; "" where it is given by its place."""
    return arg.keyword.value if arg.keyword is not None else ""


def origin_of(name: str, imports: Mapping[str, str]) -> str:
    """Where a dotted name comes from: ``torch.nn.functional.softmax`` of ``F.softmax``; "" where it is not imported."""
    first, dot, rest = name.partition(".")
    return f"{imports[first]}{dot}{rest}" if first in imports else ""


def disables_autocast(node: cst.CSTNode, imports: Mapping[str, str]) -> bool:
    """This is ``autocast(…, enabled=False)``, by whatever name, torch.cuda.amp's too, or under it.

    Under it are the block of a ``with`` and a function with such a decorator.
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
    """The module with ``import NAME`` where a person would put it; one that has it already stays as it is.

    LibCST's AddImportsVisitor puts a name behind all other imports, out of the order that linters ask for.

    Args:
        module: the file.
        name: a top-level package.
    """
    if imports_of(module.body).get(name) == name:
        return module
    line = cst.SimpleStatementLine([cst.Import([cst.ImportAlias(cst.Name(name))])])
    body: list[Statement] = list(module.body)
    section, first = _rank(line)[0], int(module.get_docstring() is not None)
    place = next((index for index in range(first, len(body)) if _rank(body[index]) >= _rank(line)), len(body))
    if place < len(body) and _rank(body[place])[0] == section:  # what stood above that one stays above
        line = line.with_changes(leading_lines=body[place].leading_lines)
        body[place] = body[place].with_changes(leading_lines=())
    body.insert(place, line)
    for index, (above, below) in enumerate(itertools.pairwise(body), 1):
        if index in (place, place + 1) and _rank(above)[0] != _rank(below)[0]:
            body[index] = apart(below, 1)
    return module.with_changes(body=body)


def _rank(line: cst.CSTNode) -> tuple[int, bool, str]:
    """The order of imports: by section, ``import`` before ``from``, by name; what is no import comes last."""
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
    """With so many blank lines above it and its comments; it may have more."""
    lines = statement.leading_lines
    blank = next((index for index, line in enumerate(lines) if line.comment is not None), len(lines))
    missing = [cst.EmptyLine(indent=False)] * (count - min(blank, count))
    return statement.with_changes(leading_lines=[*missing, *lines])


@functools.lru_cache(maxsize=4096)
def canonical(code: str) -> str:
    """An expression without what does not matter: spaces, outer parentheses, the kind of quotes."""
    try:
        # In parentheses, as it may go over several lines.
        return ast.unparse(syntax_tree(f"({code.strip()}\n)", mode="eval"))
    except SyntaxError:
        return code


def code_of(node: cst.BaseExpression) -> str:
    """The canonical text of an expression."""
    return node.value if isinstance(node, cst.Name) else canonical(_EMPTY.code_for_node(node))


def spelled(node: cst.BaseExpression) -> str:
    """An expression as the source has it, on one line and without outer parentheses."""
    text = _EMPTY.code_for_node(bare(node))
    return code_of(node) if "\n" in text else text


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and all below it, parents first, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


def find(node: cst.CSTNode, kind: type[_Node]) -> Iterator[_Node]:
    """All of one kind, the node itself included."""
    return (item for item in walk(node) if isinstance(item, kind))


def names_read(node: cst.CSTNode) -> set[str]:
    """Every name in an expression or statement, those of attributes and keywords left out."""
    hidden = {id(item.attr) for item in find(node, cst.Attribute)}
    hidden |= {id(item.keyword) for item in find(node, cst.Arg) if item.keyword is not None}
    return {name.value for name in find(node, cst.Name) if id(name) not in hidden}


def names_assigned(node: cst.CSTNode) -> set[str]:
    """Every plain name that a statement binds, those in nested functions too."""
    binding = (item for item in walk(node) if type(item) in BINDS)
    return {name for item in binding for name in _names_in(getattr(item, BINDS[type(item)]))}


def assigned_codes(statement: cst.CSTNode) -> set[str]:
    """What a statement assigns to: names, and the canonical text of attributes and subscripts."""
    parts = (target for target in targets(statement) if isinstance(target, (cst.Attribute, cst.Subscript)))
    return names_assigned(statement) | set(map(code_of, parts))


def targets(statement: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """What comes before each ``=``, or of ``+=`` and its like."""
    kinds = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign)
    return (item.target for item in walk(statement) if isinstance(item, kinds))


BINDS: Mapping[type[cst.CSTNode], str] = {
    **dict.fromkeys(
        (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.CompFor, cst.Del), "target"
    ),
    **dict.fromkeys((cst.FunctionDef, cst.ClassDef, cst.Param, cst.ExceptHandler), "name"),
    cst.WithItem: "asname",
}
"""What binds names, and where it has them."""


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
    """The expression without its parentheses."""
    return node.with_changes(lpar=(), rpar=()) if getattr(node, "lpar", ()) else node


METADATA = frozenset(
    """shape dtype device ndim size dim numel nelement stride layout names is_cuda is_floating_point is_contiguous
    is_complex requires_grad requires_grad_ element_size item tolist grad grad_fn is_leaf get_device""".split()
)
"""What a tensor says of itself; the same in half and in FP32, but for ``dtype``, which then keeps its meaning."""

TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
"""Attributes that are a view of a tensor."""

PLAIN_MODULES = frozenset("math operator itertools functools typing warnings collections einops cmath numbers".split())
"""Modules whose functions run none of the user's."""

_NUMBER_MAKERS = frozenset({"len", "int", "float", "bool", "range", "round"})


@dataclass(frozen=True)
class Bindings:
    """The names of one function, or of the module's own lines where ``function`` is None."""

    module: cst.Module
    function: cst.FunctionDef | None

    @property
    def scope(self) -> cst.CSTNode:
        """The code that the names are of."""
        return self.module if self.function is None else self.function.body

    @cached_property
    def imports(self) -> Mapping[str, str]:
        """Imports of the module's top and of the function's own."""
        own = self.function.body.body if self.function is not None else ()
        return {**imports_of(self.module.body), **imports_of(own)}

    def origin(self, node: cst.BaseExpression) -> str:
        """Where an imported function comes from (``F.softmax``: torch.nn.functional.softmax), or "".

        Also one that a variable stands for, whichever it is: ``conv = F.conv2d if x.ndim == 4 else F.conv3d``.
        """
        name = dotted(node)
        return origin_of(name, self.imports) or self._functions.get(name, "")

    @cached_property
    def _functions(self) -> Mapping[str, str]:
        """Variables that hold imported functions of one module and nothing else, with one of these."""
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
        """Parameters and everything that is assigned in the function."""
        bound = set(self.parameters) | names_assigned(self.scope)
        if self.function is not None:
            stars = (self.function.params.star_arg, self.function.params.star_kwarg)
            bound |= {star.name.value for star in stars if isinstance(star, cst.Param)}
        return frozenset(bound)

    @cached_property
    def taken(self) -> frozenset[str]:
        """Names that a new variable must not have."""
        return frozenset(
            names_read(self.scope) | self.local | names_assigned(self.module) | set(self.imports) | set(dir(builtins))
        )

    def may_assign(self, name: str) -> bool:
        """The function may assign to the name: it is its own, or new."""
        return self.function is None or name in self.local or name not in self.taken

    @cached_property
    def maybe_numbers(self) -> frozenset[str]:
        """Names that may hold a number: ``total = 0``, ``scale=1.0``, an index of a loop."""
        return self._may_hold(is_number)

    @cached_property
    def maybe_none(self) -> frozenset[str]:
        return self._may_hold(_is_none)

    def _may_hold(self, is_one: Callable[[cst.BaseExpression], bool]) -> frozenset[str]:
        """The parameters with such a default, and the names to which such a value is assigned, on a condition too."""
        found = {name for name, item in self.parameters.items() if any(map(is_one, _alternatives(item.default)))}
        assigned = (names for names, value in self._assignments() if any(map(is_one, _alternatives(value))))
        return frozenset(found.union(*assigned))

    def _assignments(self) -> Iterator[tuple[set[str], cst.BaseExpression]]:
        yield from ((names_assigned(item), item.value) for item in find(self.scope, cst.Assign))
        yield from ((set(_names_in(item.target)), item.iter) for item in find(self.scope, cst.For))


def _alternatives(value: cst.BaseExpression | None) -> Iterator[cst.BaseExpression]:
    """What an expression may give: both sides of a conditional one."""
    if isinstance(value, cst.IfExp):
        yield from (*_alternatives(value.body), *_alternatives(value.orelse))
    elif value is not None:
        yield value


def _is_none(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Name) and value.value == "None"


def is_number(value: cst.BaseExpression) -> bool:
    """``x.shape[1]``, ``x.size(0)``, ``len(xs)``, ``2``, and arithmetic with them."""
    match value:
        case cst.Integer() | cst.Float() | cst.BaseString():
            return True
        case cst.UnaryOperation(expression=inner) | cst.Subscript(value=inner):
            return is_number(inner)
        case cst.BinaryOperation():
            return is_number(value.left) and is_number(value.right)
        case cst.Attribute():
            return value.attr.value in METADATA
        case cst.Call(func=cst.Name() as function):
            return function.value in _NUMBER_MAKERS
        case cst.Call(func=cst.Attribute() as method):
            return method.attr.value in METADATA or dotted(method).startswith("math.")
    return False
