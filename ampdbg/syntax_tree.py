"""The syntax tree of Python source, also where several threads read at once."""

from __future__ import annotations

import ast
import contextlib

_TRIES = 100

UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What Python's parser raises; the last one where the stack of its own is full."""


def syntax_tree(source: str | bytes, *, mode: str = "exec") -> ast.AST:
    """As ``ast.parse``, which fails at random before Python 3.13 while another thread parses.

    Both count their depth in one place (https://github.com/python/cpython/issues/106905). A new try restarts it.

    Raises:
        SyntaxError, ValueError, MemoryError: as ``ast.parse``.
        RecursionError: it is nested too deeply. Python's parser calls that a MemoryError when its own stack is full.
    """
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(SystemError):
                return ast.parse(source, mode=mode)
        return ast.parse(source, mode=mode)
    except MemoryError as error:
        raise RecursionError(str(error)) from error
