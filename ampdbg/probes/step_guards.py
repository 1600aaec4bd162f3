"""Whether code may withhold an optimizer's own step behind ``unscale_``, as a loop that looks at its gradients does."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import lru_cache

from ampdbg.source.ownership import Line, is_users_file
from ampdbg.syntax_tree import UNPARSABLE, syntax_tree

LOOKS = ("isfinite", "isnan", "isinf", "nan_to_num")
"""Where a file has any of these words above the step, gradients may be looked at, or mended, before it."""

GUARDS = ("found_inf", "error_if_nonfinite", "_hook(")
"""The same of words that stand anywhere in it."""

GUARDS_NOTHING = frozenset({"unscale_", "clip_grad_norm_", "clip_grad_value_", "parameters", "print", "item"})
"""What may be called between the backward pass and the step: whatever else is, may look."""

_MAY_LEAVE = (ast.Continue, ast.Break, ast.Return, ast.Raise, ast.Assert, ast.Try, ast.While)


def is_unguarded(unscaled: Line | None, stepped: Line | None) -> bool:
    """Whether, of two lines of one function, the step of the second runs whatever the first has found.

    False wherever that is not plain to see: of a library's code, or of code that calls its own in between.
    """
    if unscaled is None or stepped is None or not is_users_file(stepped[0]):
        return False
    is_one_function = (unscaled[0], unscaled[2]) == (stepped[0], stepped[2])
    return is_one_function and _runs_on(stepped[0], unscaled[1], stepped[1])


@lru_cache(maxsize=64)
def _runs_on(file: str, first: int, last: int) -> bool:
    lines = linecache.getlines(file)
    text, above = "".join(lines), "".join(lines[:last])
    if any(word in text for word in GUARDS) or any(word in above for word in LOOKS):
        return False
    try:
        blocks = list(_blocks(syntax_tree(text)))
    except UNPARSABLE:
        return False
    for block in blocks:
        unscales = next((place for place, one in enumerate(block) if _is_at(one, first)), len(block))
        steps = [place for place, one in enumerate(block) if place > unscales and _is_at(one, last) and _is_step(one)]
        if steps:
            backward = max((place for place, one in enumerate(block[:unscales]) if _goes_backward(one)), default=None)
            between = block[backward + 1 : steps[0]] if backward is not None else ()
            return bool(between) and not any(_may_guard(node) for one in between for node in ast.walk(one))
    return False


def _blocks(tree: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _is_at(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def _goes_backward(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(statement))


def _is_step(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(attr="step"), [], [])):
            return True
    return False


def _may_guard(node: ast.AST) -> bool:
    match node:
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name)):
            return name not in GUARDS_NOTHING
        case ast.Attribute(attr=name):
            return name == "grad"
    return isinstance(node, (ast.Call, *_MAY_LEAVE))
