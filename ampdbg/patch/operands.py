"""Which parts of an expression are computed with: what an operation takes, and what it only looks at."""

from __future__ import annotations

import libcst as cst

from ampdbg.patch.modes import Kind, called_name, kind_of
from ampdbg.patch.tensor_names import TensorNames
from ampdbg.source.bindings import Bindings
from ampdbg.source.expressions import bare, code_of, find
from ampdbg.source.vocabulary import CASTS, METADATA, MOVES, PLAIN_BUILTINS, PRODUCTS, TRANSPOSED

_LOOKED_AT = PLAIN_BUILTINS - {"list", "tuple", "zip", "enumerate", "reversed", "min", "max", "iter", "next"}
"""Builtins that read no values of a tensor that they are given."""


def operands_of(node: cst.CSTNode, names: TensorNames, callees: frozenset[str]) -> list[cst.BaseExpression]:
    """Where no trace was made: the names that an operation or a pinned call takes, each of which may be in half."""
    if isinstance(node, cst.Call) and code_of(node.func) in callees:
        return [_tensor_in(arg.value) for arg in node.args[:1]]
    if kind_of(node, names) is not Kind.OPERATION:
        return []
    found = [_tensor_in(part) for part in _parts(node, names.bindings)]
    return [part for part in found if _is_plain(part) and (_is_product(node) or names.is_tensor(part))]


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
        case cst.Attribute(value=base, attr=cst.Name(value=name)) if name in TRANSPOSED:
            return _tensor_in(base)
        case cst.Subscript(value=cst.Name() as base):
            return base
        case _:
            return bare(node)


def not_read(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The parts of a node whose values are not computed with, or that are cast already."""
    match node:
        case cst.Attribute(value=base, attr=cst.Name(value=name) as attribute):
            is_asked = name in METADATA | CASTS and (_is_plain(base) or isinstance(base, cst.IfExp))
            return [base, attribute] if is_asked else [attribute]
        case cst.Arg(keyword=cst.Name() as keyword):
            return [keyword]
        case cst.Call():
            return _not_read_by_call(node)
        case cst.Comparison(comparisons=[cst.ComparisonTarget(operator=cst.Is() | cst.IsNot())]):
            return [node.left]
        case cst.AugAssign(target=target) | cst.AnnAssign(target=target):
            return [target]
        case cst.CompFor(target=target) | cst.NamedExpr(target=target) | cst.Param(name=target):
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


def root_name(node: cst.CSTNode) -> str:
    """``x`` of ``x[i].T``, ``self`` of ``self.weight``."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=base) | cst.Subscript(value=base) | cst.Call(func=base):
            return root_name(base)
        case _:
            return ""


def _to_float32(node: cst.CSTNode) -> bool:
    return any(name.value == "float32" for name in find(node, cst.Name))
