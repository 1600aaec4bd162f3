"""Parse Python source into a syntax tree, even while several threads parse."""

from __future__ import annotations

import ast
import contextlib

_TRIES = 100

UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""The exceptions of Python's parser. It raises MemoryError if its own stack is full."""


def syntax_tree(source: str | bytes, *, mode: str = "exec") -> ast.AST:
    """Parse as ``ast.parse`` does, which fails at random before Python 3.13 while another thread parses.

    Both threads count their depth in one place (https://github.com/python/cpython/issues/106905). A retry resets it.

    Raises:
        SyntaxError, ValueError: as ``ast.parse``.
        RecursionError: the source is nested too deeply; Python's parser raises MemoryError if its own stack is full.
    """
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(SystemError):
                return ast.parse(source, mode=mode)
        return ast.parse(source, mode=mode)
    except MemoryError as error:
        raise RecursionError(str(error)) from error
