"""The names of a file: what its imports bind, what its statements assign, and the names of one function."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ampdbg.source.expressions import alternatives, is_none

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` as text, or "" if the expression is not made of names and dots."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=base, attr=name) if owner := dotted(base):
            return f"{owner}.{name}"
    return ""


def imports_of(body: Iterable[ast.AST]) -> dict[str, str]:
    """Map the local names that the imports in ``body`` bind to dotted names: ``F`` to torch.nn.functional.

    Imports inside ``if`` and ``try`` count (``if is_torch_available():``), except under ``TYPE_CHECKING``.
    """
    bound: dict[str, str] = {}
    for statement in body:
        match statement:
            case ast.Import(names=aliases):
                for alias in aliases:
                    # `import torch.nn` binds torch; `import torch.nn as nn` binds torch.nn.
                    root = alias.name.partition(".")[0]
                    bound |= {alias.asname: alias.name} if alias.asname else {root: root}
            case ast.ImportFrom(module=module, names=aliases, level=level):
                origin = "." * level + (module or "")
                bound |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in aliases}
                bound.pop("*", None)
            case ast.If(test=test) if dotted(test).rpartition(".")[2] == "TYPE_CHECKING":
                continue
            case ast.If(body=inner) | ast.Try(body=inner):
                bound |= imports_of(inner)
    return bound


def origin_of(name: str, imports: Mapping[str, str]) -> str:
    """Return the full name of an imported dotted name (torch.nn.functional.softmax for ``F.softmax``), or ""."""
    first, dot, rest = name.partition(".")
    return f"{imports[first]}{dot}{rest}" if first in imports else ""


def disables_autocast(node: ast.AST, imports: Mapping[str, str]) -> bool:
    """True if the node is an ``autocast(…, enabled=False)`` call, a ``with`` of one, or a function decorated by one.

    Any import name counts, and so does ``torch.cuda.amp.autocast``.
    """
    match node:
        case ast.With(items=managers) | ast.AsyncWith(items=managers):
            return any(disables_autocast(manager.context_expr, imports) for manager in managers)
        case ast.FunctionDef(decorator_list=decorators) | ast.AsyncFunctionDef(decorator_list=decorators):
            return any(disables_autocast(decorator, imports) for decorator in decorators)
        case ast.Call(func=function, keywords=keywords):
            origin = origin_of(dotted(function), imports) or dotted(function)
            is_off = any(one.arg == "enabled" and ast.unparse(one.value) == "False" for one in keywords)
            return is_off and origin.startswith("torch.") and origin.endswith("autocast")
    return False


BINDS = {
    ast.Name: "id",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.ExceptHandler: "name",
    ast.arg: "arg",
}
"""The attribute that holds the bound name, by kind of node; a name that is only read binds nothing."""


def names_assigned(node: ast.AST) -> set[str]:
    """Return every plain name that a statement binds, including in nested functions."""
    binding = (one for one in ast.walk(node) if type(one) in BINDS and not is_read(one))
    return {getattr(one, BINDS[type(one)]) for one in binding} - {None}


def is_read(node: ast.AST) -> bool:
    """True for a name, attribute or element that is read, not assigned."""
    return isinstance(getattr(node, "ctx", None), ast.Load)


def places_assigned(node: ast.AST) -> set[str]:
    """Return the texts of the attributes and elements that a statement assigns."""
    places = (one for one in ast.walk(node) if isinstance(one, (ast.Attribute, ast.Subscript)))
    return {ast.unparse(one) for one in places if not is_read(one)}


METADATA = frozenset(
    """shape dtype device ndim size dim numel nelement stride layout names is_cuda is_floating_point is_contiguous
    is_complex requires_grad requires_grad_ element_size item tolist grad grad_fn is_leaf get_device""".split()
)
"""Tensor members that describe a tensor. They are the same in half and FP32, and ``dtype`` keeps its meaning."""

_NUMBER_MAKERS = frozenset({"len", "int", "float", "bool", "range", "round"})


@dataclass(frozen=True)
class Bindings:
    """The names of one function, or of module-level code if ``function`` is None."""

    module: ast.Module
    function: ast.FunctionDef | ast.AsyncFunctionDef | None

    @cached_property
    def scope(self) -> ast.Module:
        """The code to which the names belong."""
        return self.module if self.function is None else ast.Module(self.function.body, [])

    @cached_property
    def imports(self) -> Mapping[str, str]:
        """Imports at the top of the module and in the function."""
        return {**imports_of(self.module.body), **imports_of(self.scope.body)}

    def origin(self, node: ast.AST) -> str:
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
                held.setdefault(name, []).extend(origin_of(dotted(one), self.imports) for one in alternatives(value))
        modules = {name: {origin.rpartition(".")[0] for origin in origins} for name, origins in held.items()}
        return {name: origins[0] for name, origins in held.items() if len(modules[name]) == 1 and origins[0]}

    @cached_property
    def parameters(self) -> Mapping[str, ast.expr | None]:
        """The parameters with their defaults."""
        if self.function is None:
            return {}
        given = self.function.args
        names = [one.arg for one in (*given.posonlyargs, *given.args)]
        defaults = dict(zip(reversed(names), reversed(given.defaults), strict=False))
        by_keyword = {one.arg: default for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)}
        return {**{name: defaults.get(name) for name in names}, **by_keyword}

    @cached_property
    def local(self) -> frozenset[str]:
        """The parameters and every name that the function assigns."""
        given = names_assigned(self.function.args) if self.function is not None else set()
        return frozenset(given | names_assigned(self.scope))

    @cached_property
    def taken(self) -> frozenset[str]:
        """Names that are unavailable for a new variable."""
        read = {one.id for one in ast.walk(self.scope) if isinstance(one, ast.Name)}
        return frozenset(read | self.local | names_assigned(self.module) | set(self.imports) | set(dir(builtins)))

    def may_assign(self, name: str) -> bool:
        """True if an assignment to the name stays in the function: the name is local to it, or new."""
        return self.function is None or name in self.local or name not in self.taken

    @cached_property
    def maybe_plain_values(self) -> frozenset[str]:
        """Names that may hold a number: ``total = 0``, ``scale=1.0``, a loop index."""
        return self._may_hold(is_plain_value)

    @cached_property
    def maybe_none(self) -> frozenset[str]:
        return self._may_hold(is_none)

    def _may_hold(self, is_one: Callable[[ast.AST], bool]) -> frozenset[str]:
        """Return the names with a default or assigned value that ``is_one`` accepts, even in one branch only."""
        given = (({name}, value) for name, value in self.parameters.items() if value is not None)
        held = (names for names, value in (*given, *self._assignments()) if any(map(is_one, alternatives(value))))
        return frozenset().union(*held)

    def _assignments(self) -> Iterator[tuple[set[str], ast.expr]]:
        for one in ast.walk(self.scope):
            if isinstance(one, ast.Assign):
                yield names_assigned(one), one.value
            elif isinstance(one, (ast.For, ast.AsyncFor)):
                yield names_assigned(one.target), one.iter


def is_plain_value(value: ast.AST) -> bool:
    """True for ``x.shape[1]``, ``x.size(0)``, ``len(xs)``, ``2``, and arithmetic on such values."""
    match value:
        case ast.Constant(value=held):
            return type(held) in (int, float, str, bytes)
        case ast.JoinedStr():
            return True
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
            return is_plain_value(inner)
        case ast.BinOp(left=left, right=right):
            return is_plain_value(left) and is_plain_value(right)
        case ast.Attribute(attr=name):
            return name in METADATA
        case ast.Call(func=ast.Name(id=name)):
            return name in _NUMBER_MAKERS
        case ast.Call(func=ast.Attribute(attr=name) as method):
            return name in METADATA or dotted(method).startswith("math.")
    return False
