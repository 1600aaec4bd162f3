"""Read single expressions: the called method, the arguments of a call, the value of a number."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator


def walk(node: ast.AST, closed: Collection[ast.AST] = ()) -> Iterator[ast.AST]:
    """Yield the node and the nodes in it in the order of the text, parents first; nothing in ``closed`` nodes.

    Nodes inside f-strings are left out too, since Pythons before 3.12 misplace them.
    """
    yield node
    if node not in closed and not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from walk(child, closed)


def alternatives(value: ast.AST) -> Iterator[ast.AST]:
    """Yield the values that an expression may have: both sides of a conditional expression, and of an ``or``."""
    match value:
        case ast.IfExp(body=one, orelse=other):
            yield from (*alternatives(one), *alternatives(other))
        case ast.BoolOp(op=ast.Or(), values=values):
            yield from (given for one in values for given in alternatives(one))
        case _:
            yield value


def is_none(node: ast.AST) -> bool:
    """True for the constant None."""
    return isinstance(node, ast.Constant) and node.value is None


def argument(call: ast.Call, keyword: str, index: int | None = None) -> ast.expr | None:
    """Return an argument by its name or its place; None if it is not given, or if a star hides it."""
    named = next((one.value for one in call.keywords if one.arg == keyword), None)
    if named is not None or index is None or any(isinstance(one, ast.Starred) for one in call.args[: index + 1]):
        return named
    return call.args[index] if len(call.args) > index else None


def takes_stars(call: ast.Call) -> bool:
    """True if stars hide some arguments."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)


def given(call: ast.Call) -> list[ast.expr]:
    """Return every argument, by its place or its name."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def method(node: ast.AST | None, *names: str) -> ast.expr | None:
    """Return the object on which a method with one of the names is called; None for any other node."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in names:
            return owner
    return None


def unmoved(node: ast.AST) -> ast.AST:
    """Return a model as it was created: ``Net()`` for ``Net().to(device).half()``."""
    while (inner := method(node, "to", "cuda", "train", "eval", "half", "float")) is not None:
        node = inner
    return node


def constant(node: ast.AST | None) -> object:
    """Return the value of a constant; ``...`` for any other node."""
    return node.value if isinstance(node, ast.Constant) else ...


def number(node: ast.AST | None) -> float | None:
    """Return the number that a numeric expression is: ``-1e9``, ``-(2 ** 20)``, ``float("-1e9")``; else None."""
    try:
        return _number(node)
    except (ValueError, OverflowError, TypeError, ZeroDivisionError):
        return None


def _number(node: ast.AST | None) -> float:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.Attribute(attr="inf"):
            return math.inf
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return float(_number(left) ** _number(right))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as text)]):
            return float(text)
    raise ValueError
