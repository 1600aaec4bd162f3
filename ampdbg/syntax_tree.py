"""The syntax tree of Python source, also where several threads read at once."""

from __future__ import annotations

import ast

_TRIES = 100


def syntax_tree(source: str | bytes, *, mode: str = "exec") -> ast.AST:
    """As ``ast.parse``, which fails at random before Python 3.13 while another thread parses.

    Both count their depth in one place (https://github.com/python/cpython/issues/106905). A new try begins it anew.

    Raises:
        SyntaxError, ValueError, RecursionError: as ``ast.parse``.
    """
    for _ in range(_TRIES):
        try:
            return ast.parse(source, mode=mode)
        except SystemError:
            continue
    return ast.parse(source, mode=mode)
