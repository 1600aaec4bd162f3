"""Edits of a document: insert lines beside a statement, remove it, or move it into or out of a block."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from ampdbg.lint.document import Document
from ampdbg.lint.expressions import argument
from ampdbg.lint.rule import Edit


def replaced(document: Document, node: ast.AST, new: str) -> Edit:
    """Return an edit that replaces a node with ``new``."""
    span = document.span(node)
    return Edit(span.start, span.end, new)


def above(document: Document, statement: ast.stmt, *lines: str) -> Edit:
    """Return an edit that inserts lines above a statement, with its indentation."""
    at, indent = document.lines(statement).start, document.indent(statement)
    return Edit(at, at, "".join(f"{indent}{line}{document.newline}" for line in lines))


def below(document: Document, statement: ast.stmt, *lines: str) -> Edit:
    """Return an edit that inserts lines below a statement, with its indentation."""
    at, indent = document.lines(statement).end, document.indent(statement)
    text = "".join(f"{indent}{line}{document.newline}" for line in lines)
    is_last = not document.text[:at].endswith(("\n", "\r"))
    return Edit(at, at, f"{document.newline}{text.rstrip()}" if is_last else text)


def removed(document: Document, statement: ast.stmt) -> Edit:
    """Return an edit that removes a statement with its lines; ``pass`` replaces the only statement of a block."""
    if len(document.block(statement)) == 1:
        return replaced(document, statement, "pass")
    span = document.lines(statement)
    return Edit(span.start, span.end, "")


def is_movable(document: Document, statements: Sequence[ast.stmt]) -> bool:
    """True if adjacent statements can be moved: they have their own lines, and no string over several lines."""
    strings = (node for one in statements for node in ast.walk(one) if isinstance(node, (ast.Constant, ast.JoinedStr)))
    return document.has_own_lines(statements[0], statements[-1]) and not any(
        node.lineno != node.end_lineno and ("'''" in document.source(node) or '"""' in document.source(node))
        for node in strings
    )


def dedented(document: Document, statements: Sequence[ast.stmt], by: str) -> list[Edit]:
    """Return edits that dedent adjacent statements by ``by``, with the comments between and right above them."""
    first = statements[0].lineno
    while document.line(first - 1).strip().startswith("#"):
        first -= 1
    span = document.offset(first, 0), document.lines(statements[-1]).end
    return [
        Edit(start, start + len(by), "")
        for start in _line_starts(document, *span)
        if document.text.startswith(by, start)
    ]


def indented(document: Document, statements: Sequence[ast.stmt], head: str, by: str) -> list[Edit]:
    """Return edits that indent adjacent statements by ``by``, below a new line ``head``."""
    span = document.lines(statements[0]).start, document.lines(statements[-1]).end
    return [above(document, statements[0], head), *(Edit(at, at, by) for at in _line_starts(document, *span))]


def with_keyword(document: Document, call: ast.Call, name: str, value: str) -> Edit:
    """Return an edit that gives a call this keyword argument; of an existing pair the first value stays."""
    known = argument(call, name)
    if isinstance(known, ast.Tuple):
        return replaced(document, known.elts[-1], str(ast.literal_eval(value)[-1]))
    if known is not None:
        return replaced(document, known, value)
    end = document.span(call).end - 1
    before = document.text[:end].rstrip()
    comma = "" if before.endswith("(") else ", "
    own = document.text[len(before.rstrip(",")) : len(before)]  # a comma after the last argument
    return Edit(len(before) - len(own), len(before), f"{comma}{name}={value}{own}")


def _line_starts(document: Document, start: int, end: int) -> list[int]:
    """Return the offsets of the lines of a piece of text, without blank lines."""
    return [start + found.start() for found in re.finditer(r"(?m)^(?=[^\r\n])[^\r\n]*\S", document.text[start:end])]


def indent_unit(document: Document, inner: ast.stmt, outer: ast.stmt) -> str:
    """Return the indentation of ``inner`` beyond that of ``outer``, the statement around it."""
    return document.indent(inner)[len(document.indent(outer)) :]
