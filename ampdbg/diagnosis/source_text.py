"""What a line of source tells of a remedy: whether a product is scaled only after it is made, whether it sums."""

from __future__ import annotations

import ast

PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul", "mm"})
SCALINGS = frozenset({"div", "div_", "mul", "mul_"})


def scales_after_its_product(line: str) -> bool:
    """Whether the line multiplies or divides what a product has made: ``(q @ k) * s``, ``torch.bmm(q, k).div(d)``.

    A line that is no whole statement tells nothing, and neither does a scaling that stands on another line.
    """
    return any(_has_product(scaled) for node in _nodes(line) for scaled in _scaled(node))


def takes_a_sum(line: str) -> bool:
    """Whether the line calls a ``sum``, or asks a loss to sum."""
    return any(
        isinstance(node, ast.Call) and (_called(node) == "sum" or any(map(_asks_for_sum, node.keywords)))
        for node in _nodes(line)
    )


def _nodes(line: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(line.strip())))
    except (SyntaxError, ValueError):
        return []


def _scaled(node: ast.AST) -> list[ast.AST]:
    """What the node scales, where it is a scaling."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [node.left]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [node.left, node.right]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SCALINGS:
        return [node.func.value]
    return []


def _has_product(node: ast.AST) -> bool:
    return any(
        (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.MatMult))
        or (isinstance(inner, ast.Call) and _called(inner) in PRODUCTS)
        for inner in ast.walk(node)
    )


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _asks_for_sum(keyword: ast.keyword) -> bool:
    return keyword.arg == "reduction" and isinstance(keyword.value, ast.Constant) and keyword.value.value == "sum"
