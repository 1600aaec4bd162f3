"""``.float()`` on exactly the names that hold half tensors in statements that run in FP32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from .bindings import Bindings
from .expressions import bare, code_of, find, names_assigned, walk
from .modes import Kind, called_name, kind_of
from .steps import assigned_codes
from .tensor_names import TensorNames
from .vocabulary import CASTS, JOINS, METADATA, MOVES, PLAIN_BUILTINS, PRODUCTS

REBIND_FROM = 3
"""From so many uses on, a name is cast once at the block's start: ``q = q.float()``."""

_TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
_TO_A_DTYPE = frozenset({"to", "type", "type_as", "half", "bfloat16"})
_LOOKED_AT = PLAIN_BUILTINS - {"list", "tuple", "zip", "enumerate", "reversed", "min", "max", "iter", "next"}
"""Builtins that read no values of a tensor that they are given."""


@dataclass(frozen=True)
class PinnedStatement:
    """A statement of a block, what is known of the names in it, and the callees that are themselves pinned."""

    statement: cst.BaseSmallStatement
    names: TensorNames
    callees: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CastStatements:
    """The statements with their casts; ``cast`` are the expressions that were, ``rebound`` names at the start first."""

    statements: tuple[cst.BaseSmallStatement, ...]
    rebound: tuple[str, ...]
    cast: tuple[str, ...]


def cast_statements(
    pinned: Sequence[PinnedStatement], made: frozenset[str] = frozenset(), *, rebinds: bool = True
) -> CastStatements:
    """Casts the half names of consecutive statements, those left out that the statements made before (in FP32).

    Args:
        pinned: what stands in the block.
        made: what already holds FP32 when the block is entered.
        rebinds: whether a name that is used often may be cast once, in front of them.
    """
    once = _cast_in_order(pinned, made)
    uses = Counter(once.cast)
    often = [code for code, count in uses.items() if count >= REBIND_FROM and _can_rebind(code, pinned)]
    if not often or not rebinds:
        return once
    again = _cast_in_order(pinned, made | set(often))
    return CastStatements(again.statements, tuple(often), tuple(dict.fromkeys(once.cast)))


def _cast_in_order(pinned: Sequence[PinnedStatement], made: frozenset[str]) -> CastStatements:
    statements, cast, known = [], [], set(made)
    for item in pinned:
        casts = _Casts(item, frozenset(known))
        statements.append(_visited(item.statement, casts))
        cast += casts.cast
        assigned = assigned_codes(item.statement)
        known = known - assigned if _asks_for_a_dtype(item.statement) else known | assigned
    return CastStatements(tuple(statements), (), tuple(cast))


def _visited(statement: cst.BaseSmallStatement, casts: _Casts) -> cst.BaseSmallStatement:
    result = statement.visit(casts)
    return result if isinstance(result, cst.BaseSmallStatement) else statement


def _can_rebind(code: str, pinned: Sequence[PinnedStatement]) -> bool:
    """Plain names of the function alone; not those of a comprehension, nor those that another function sees."""
    inner = {
        name
        for item in pinned
        for c in walk(item.statement)
        if isinstance(c, cst.CompFor)
        for name in names_assigned(c)
    }
    bindings = pinned[0].names.bindings
    return code in bindings.local and code not in inner and code not in bindings.shared


def _asks_for_a_dtype(statement: cst.CSTNode) -> bool:
    """Whether what it assigns may be in half for all that its operands are not: ``.to(q.dtype)``, ``dtype=``."""
    calls = list(find(statement, cst.Call))
    keywords = {arg.keyword.value for call in calls for arg in call.args if arg.keyword is not None}
    return "dtype" in keywords or any(
        called_name(call) in {"to", "type", "type_as", "half", "bfloat16"} for call in calls
    )


def cast(node: cst.BaseExpression) -> cst.Call:
    """``node.float()``."""
    return cst.Call(cst.Attribute(node, cst.Name("float")))


class _Casts(cst.CSTTransformer):
    """Casts the half expressions of one statement and lists them, in their order."""

    def __init__(self, pinned: PinnedStatement, made: frozenset[str]) -> None:
        super().__init__()
        self.cast: list[str] = []
        self._names, self._callees, self._made = pinned.names, pinned.callees, made
        self._operands: set[int] = set()
        self._left: set[int] = set()
        self._cast_already: set[int] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if id(node) in self._left or isinstance(node, (cst.AssignTarget, cst.Annotation)):
            return False
        if isinstance(node, cst.Attribute) and node.attr.value in CASTS:
            self._cast_already.add(id(node.value))
        for part in _not_read(node):
            self._left.add(id(part))
        if not self._names.is_traced:
            self._operands |= {id(part) for part in self._operands_of(node)}
        return not self._is_half(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        if isinstance(updated_node, cst.BinaryOperation):
            return _spaced(updated_node)
        if id(original_node) in self._left or not self._is_half(original_node):
            return updated_node
        if not isinstance(original_node, cst.BaseExpression) or not isinstance(updated_node, cst.BaseExpression):
            return updated_node
        self.cast.append(self._tensor_of(original_node))
        return cast(updated_node)

    def _tensor_of(self, node: cst.BaseExpression) -> str:
        """What is cast, as a text: of an element, the tensor that it is taken from."""
        code = code_of(node)
        is_element = isinstance(node, cst.Subscript) and code not in self._names.half and id(node) not in self._operands
        return self._tensor_of(node.value) if is_element and isinstance(node, cst.Subscript) else code

    def _is_half(self, node: cst.CSTNode) -> bool:
        """A half tensor, or an element of one: ``x``, ``x[:, 0]``."""
        if not isinstance(node, (cst.Name, cst.Attribute, cst.Subscript, cst.Call)):
            return False
        code = code_of(node)
        if code in self._made or _root_name(node) in self._made:
            return False
        if code in self._names.half or id(node) in self._operands or self._joins_unknown(node):
            return code not in self._names.full
        return isinstance(node, cst.Subscript) and self._is_half(node.value)

    def _joins_unknown(self, node: cst.CSTNode) -> bool:
        """``torch.stack(rows)``: a trace tells of tensors, and not what lists hold."""
        if not isinstance(node, cst.Call) or called_name(node) not in JOINS or not node.args:
            return False
        if id(node) in self._cast_already:
            return False
        joined = node.args[0].value
        return isinstance(joined, cst.Name) and joined.value not in self._made | self._names.half | self._names.full

    def _operands_of(self, node: cst.CSTNode) -> list[cst.BaseExpression]:
        """Where no trace was made: the names that an operation takes, each of which may be in half."""
        if isinstance(node, cst.Call) and code_of(node.func) in self._callees:
            return [_tensor_in(arg.value) for arg in node.args[:1]]
        if kind_of(node, self._names) is not Kind.OPERATION:
            return []
        found = [_tensor_in(part) for part in _parts(node, self._names.bindings)]
        return [part for part in found if _is_plain(part) and (_is_product(node) or self._names.is_tensor(part))]


def _parts(node: cst.CSTNode, bindings: Bindings) -> list[cst.BaseExpression]:
    if isinstance(node, cst.BinaryOperation):
        return [node.left, node.right]
    if not isinstance(node, cst.Call):
        return []
    base = [node.func.value] if isinstance(node.func, cst.Attribute) and not bindings.origin(node.func) else []
    arguments = [arg.value for arg in node.args if arg.keyword is None]
    return base + (arguments if called_name(node) in PRODUCTS else arguments[: 1 - len(base)])


def _is_product(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.BinaryOperation):
        return isinstance(node.operator, cst.MatrixMultiply)
    return isinstance(node, cst.Call) and called_name(node) in PRODUCTS


def _tensor_in(node: cst.BaseExpression) -> cst.BaseExpression:
    """``k`` of ``k[0]`` and of ``k.transpose(-2, -1)``."""
    match node:
        case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value=name))) if name in MOVES - CASTS:
            return _tensor_in(base)
        case cst.Attribute(value=base, attr=cst.Name(value=name)) if name in _TRANSPOSED:
            return _tensor_in(base)
        case cst.Subscript(value=cst.Name() as base):
            return base
        case _:
            return bare(node)


def _spaced(node: cst.BinaryOperation) -> cst.BinaryOperation:
    """``x**2`` becomes ``x.float() ** 2``: formatters set spaces where an operand is a call."""
    is_tight = isinstance(node.operator, cst.Power) and node.operator.whitespace_before.empty
    if not is_tight or not any(isinstance(side, cst.Call) for side in (node.left, node.right)):
        return node
    return node.with_changes(operator=cst.Power())


def _not_read(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The parts of a node whose values are not computed with, or that are cast already."""
    match node:
        case cst.Attribute(value=base, attr=cst.Name(value=name) as attribute):
            return [base, attribute] if name in METADATA | CASTS and _is_plain(base) else [attribute]
        case cst.Arg(keyword=cst.Name() as keyword):
            return [keyword]
        case cst.Call():
            return _not_read_by_call(node)
        case cst.Comparison(comparisons=[cst.ComparisonTarget(operator=cst.Is() | cst.IsNot())]):
            return [node.left]
        case cst.AugAssign(target=target) | cst.AnnAssign(target=target) | cst.CompFor(target=target):
            return [target]
        case _:
            return []


def _not_read_by_call(call: cst.Call) -> list[cst.CSTNode]:
    match call.func:
        case cst.Attribute(value=base, attr=cst.Name(value="to")) if _is_plain(base) and _to_float32(call):
            return [base]
        case cst.Name(value=name):
            return [call.func, *(call.args if name in _LOOKED_AT else ())]
        case _:
            return []


def _is_plain(node: cst.BaseExpression) -> bool:
    return isinstance(node, (cst.Name, cst.Attribute, cst.Subscript))


def _root_name(node: cst.CSTNode) -> str:
    """``x`` of ``x[i].T``, ``self`` of ``self.weight``."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=base) | cst.Subscript(value=base) | cst.Call(func=base):
            return _root_name(base)
        case _:
            return ""


def _to_float32(node: cst.CSTNode) -> bool:
    return any(name.value == "float32" for name in find(node, cst.Name))
