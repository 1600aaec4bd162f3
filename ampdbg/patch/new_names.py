"""What the edits call the variables that they introduce."""

from __future__ import annotations

from keyword import iskeyword

import libcst as cst

from ampdbg.patch.modes import called_name
from ampdbg.source.vocabulary import MOVES, PRODUCTS, TENSOR_METHODS

OPERATOR_NAMES: dict[type[cst.BaseBinaryOp], str] = {
    cst.Add: "total",
    cst.Subtract: "difference",
    cst.Multiply: "product",
    cst.MatrixMultiply: "product",
    cst.Divide: "ratio",
}
"""What a new variable is called that holds the result of an operator."""

RESULT = "result"
UPDATE = "update"
"""What is added to a residual stream."""


def name_for(node: cst.BaseExpression, parent: cst.CSTNode | None) -> str:
    """What a person would call the value of an expression: in a dict what its key says."""
    if isinstance(parent, cst.DictElement) and (key := _text(parent.key)).isidentifier() and not iskeyword(key):
        return key
    if isinstance(node, cst.BinaryOperation):
        return OPERATOR_NAMES.get(type(node.operator), RESULT)
    call = _call_in(node)
    if call is None:
        return RESULT
    if _is_residual(parent):
        return UPDATE
    name = called_name(call).strip("_")
    if name in PRODUCTS:
        return "product"
    return RESULT if not name or name == "forward" or name in TENSOR_METHODS | MOVES else name


def _text(key: cst.BaseExpression) -> str:
    value = key.evaluated_value if isinstance(key, cst.SimpleString) else ""
    return value if isinstance(value, str) else ""


def _is_residual(parent: cst.CSTNode | None) -> bool:
    """Whether this is ``x + f(x)``, a residual stream and what is added to it."""
    return (
        isinstance(parent, cst.BinaryOperation)
        and isinstance(parent.operator, cst.Add)
        and any(isinstance(side, (cst.Name, cst.Attribute)) for side in (parent.left, parent.right))
    )


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


def first_name(value: cst.BaseExpression) -> str:
    """``x`` of ``x + y`` and of ``x.view(1)``; "" of a call of a function."""
    match value:
        case cst.Name(value=name):
            return name
        case cst.BinaryOperation(left=first) | cst.Subscript(value=first) | cst.Attribute(value=first):
            return first_name(first)
        case cst.Call(func=cst.Attribute(value=first)):
            return first_name(first)
        case _:
            return ""
