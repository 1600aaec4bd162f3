"""One statement taken apart into steps: what runs under autocast, what runs in FP32, in the order that it had."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from ampdbg.ops import MOVES, PRODUCTS, TENSOR_METHODS
from ampdbg.patch.regions import Region, Regions, called_name
from ampdbg.source.expressions import bare, code_of, find, walk
from ampdbg.source.source_file import EditError

OPERATOR_NAMES: dict[type[cst.BaseBinaryOp], str] = {
    cst.Add: "total",
    cst.Subtract: "difference",
    cst.Multiply: "product",
    cst.MatrixMultiply: "product",
    cst.Divide: "ratio",
}
"""What a new variable is called that holds the result of an operator."""

RESULT = "result"


def name_for(node: cst.BaseExpression) -> str:
    """What a person would call the value of an expression."""
    if isinstance(node, cst.BinaryOperation):
        return OPERATOR_NAMES.get(type(node.operator), RESULT)
    call = _call_in(node)
    if call is None:
        return RESULT
    name = called_name(call).strip("_")
    if name in PRODUCTS:
        return "product"
    return RESULT if not name or name == "forward" or name in TENSOR_METHODS | MOVES else name


def _call_in(node: cst.BaseExpression) -> cst.Call | None:
    """The call in ``f(x)``, ``f(x)[0]``, ``f(x).view(1).T``: the first one."""
    match node:
        case cst.Call(func=cst.Name(value="super")):
            return None
        case cst.Call(func=cst.Attribute(value=base)) if _call_in(base) is not None:
            return _call_in(base)
        case cst.Call():
            return node
        case cst.Attribute(value=base) | cst.Subscript(value=base):
            return _call_in(base)
        case _:
            return None


def unused(name: str, taken: frozenset[str]) -> str:
    """``name``, or with something behind it where it is taken."""
    candidates = (name, f"{name}_out", *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate.isidentifier() and candidate not in taken)


VALUE_FIELDS: dict[type[cst.CSTNode], str] = {
    cst.Assign: "value",
    cst.AnnAssign: "value",
    cst.AugAssign: "value",
    cst.Expr: "value",
    cst.Return: "value",
    cst.Assert: "test",
}
"""Statements, and their expression that can be taken apart."""


@dataclass(frozen=True)
class Part:
    """A value that is computed before its statement: ``name = value``. ``origin`` is what it was in the source."""

    mode: Region
    name: str
    value: cst.BaseExpression
    origin: str


@dataclass(frozen=True)
class Apart:
    """A statement taken apart: the steps before it, and what is left of it, which runs in ``mode``."""

    parts: tuple[Part, ...]
    rest: cst.BaseSmallStatement
    mode: Region


def take_apart(statement: cst.BaseSmallStatement, regions: Regions) -> Apart:
    """The steps of a pinned statement.

    Raises:
        EditError: there is nothing to pin in it, or it cannot be taken apart without a change of what it does.
    """
    value = value_of(statement)
    computes = regions.operations and isinstance(statement, cst.AugAssign)
    if value is None or not (computes or regions.has_fp32(value)):
        raise EditError(_nothing_to_pin(regions))
    want = _mode_of(statement, value, regions)
    placer = _Placer(regions, want, value)
    placed = value.visit(placer)
    if not isinstance(placed, cst.BaseExpression):
        raise TypeError(f"an expression became {type(placed).__name__}")
    if placer.parts and next(find(statement, cst.NamedExpr), None) is not None:
        raise EditError("it binds a name with := in an expression that has to be split")
    rest = statement.with_changes(**{VALUE_FIELDS[type(statement)]: placed})
    return Apart(tuple(placer.parts), rest, want)


def value_of(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """The expression of a statement that may be taken apart."""
    field = VALUE_FIELDS.get(type(statement))
    value = getattr(statement, field) if field else None
    return value if isinstance(value, cst.BaseExpression) else None


def _nothing_to_pin(regions: Regions) -> str:
    if regions.callees:
        return f"{' and '.join(sorted(regions.callees))} is not called here"
    return "it only calls modules or functions; pin what it calls"


def _mode_of(statement: cst.BaseSmallStatement, value: cst.BaseExpression, regions: Regions) -> Region:
    if isinstance(statement, cst.AugAssign):
        return Region.FP32 if regions.operations else Region.AUTOCAST
    mode = regions.of(value)
    return Region.FP32 if mode is Region.EITHER else mode


@dataclass(frozen=True)
class _Visited:
    """A call with an effect, or what becomes a step: where it stands in the order of evaluation, and its first part."""

    node: cst.CSTNode
    start: int
    end: int
    is_step: bool
    has_effect: bool


class _Placer(cst.CSTTransformer):
    """Replaces each part whose mode is not that of what surrounds it by a name, and keeps what the name stands for."""

    def __init__(self, regions: Regions, want: Region, root: cst.BaseExpression) -> None:
        super().__init__()
        self.parts: list[Part] = []
        self._regions = regions
        self._wants = [want]
        self._parents: list[cst.CSTNode] = []
        self._forced = _out_of_order(list(_visit_order(root, want, regions)))

    def on_visit(self, node: cst.CSTNode) -> bool:
        is_callee = bool(self._parents) and _is_callee(node, self._parents[-1])
        self._wants.append(_inner_mode(node, self._wants[-1], self._regions, is_callee))
        self._parents.append(node)
        return not self._regions.is_whole(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        self._parents.pop()
        mode = self._wants.pop()
        if mode is self._wants[-1] and id(original_node) not in self._forced:
            return updated_node
        if not isinstance(original_node, cst.BaseExpression) or not isinstance(updated_node, cst.BaseExpression):
            return updated_node
        name = self._new_name(original_node)
        value = _standing_alone(updated_node, self._regions.names.bindings.module.default_indent)
        self.parts.append(Part(mode, name, value, code_of(original_node)))
        return cst.Name(name)

    def _new_name(self, node: cst.BaseExpression) -> str:
        return unused(name_for(node), self._regions.names.bindings.taken | {step.name for step in self.parts})


def _inner_mode(node: cst.CSTNode, want: Region, regions: Regions, is_callee: bool) -> Region:
    # In `f(x).sum()` what may be taken out is `f(x)`, and not the method `f(x).sum`.
    mode = regions.of(node) if isinstance(node, cst.BaseExpression) and not is_callee else Region.EITHER
    return want if mode is Region.EITHER else mode


def _is_callee(node: cst.CSTNode, parent: cst.CSTNode) -> bool:
    return isinstance(parent, cst.Call) and parent.func is node and isinstance(node, cst.Attribute)


def _standing_alone(node: cst.BaseExpression, indent: str) -> cst.BaseExpression:
    """The expression with parentheses only where it goes over several lines that would fall apart."""
    value = bare(node)
    try:
        ast.parse(cst.Module([]).code_for_node(value), mode="eval")
    except SyntaxError:
        opened = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))
        closed = cst.ParenthesizedWhitespace(indent=True)
        return value.with_changes(lpar=[cst.LeftParen(opened)], rpar=[cst.RightParen(closed)])
    return value


def _visit_order(
    node: cst.CSTNode, want: Region, regions: Regions, count: int = 0, is_callee: bool = False
) -> Iterator[_Visited]:
    """The steps and the calls with effects below ``node``, in the order of evaluation."""
    mode = _inner_mode(node, want, regions, is_callee)
    start, has_effect = count, False
    for child in () if regions.is_whole(node) else node.children:
        for item in _visit_order(child, mode, regions, count, _is_callee(child, node)):
            has_effect |= item.has_effect
            count = item.end + 1
            yield item
    own_effect = any(regions.has_effect(item) for item in (walk(node) if regions.is_whole(node) else (node,)))
    has_effect |= own_effect
    if mode is not want or own_effect:
        yield _Visited(node, start, count, mode is not want, has_effect)


def _out_of_order(visited: list[_Visited]) -> set[int]:
    """What must become a step too, because a step with an effect that comes later would overtake it."""
    forced: set[int] = set()
    for item in visited:
        carrier = next((o for o in visited if o.is_step and o.start <= item.end < o.end), None)
        last = carrier.end if carrier is not None else len(visited)
        overtaking = (o for o in visited if o.is_step and o.has_effect and item.end < o.start and o.end < last)
        if not item.is_step and next(overtaking, None) is not None:
            forced.add(id(item.node))
    return forced
