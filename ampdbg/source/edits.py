"""Edits of a source file: pieces of its text are replaced, and the rest keeps every byte."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampdbg.source.document import FUNCTIONS, Document
from ampdbg.source.expressions import argument
from ampdbg.source.names import imports_of


@dataclass(frozen=True)
class Edit:
    """A replacement for the characters from ``start`` to ``end``; an insertion if the two are equal."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Fix:
    """Edits that are applied together or not at all. ``imports`` are the modules that they need by name."""

    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()


def applied(document: Document, fixes: Sequence[Fix]) -> str:
    """Return the text with the edits of the fixes, and the imports that they need."""
    text = edited(document.text, dict.fromkeys(edit for fix in fixes for edit in fix.edits))
    for name in sorted({name for fix in fixes for name in fix.imports}):
        text = with_imported(text, name)
    return text


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with the edits; of two edits that overlap, with the first. Insertions at one place keep their
    order."""
    parts, at = [], 0
    for edit in sorted(edits, key=lambda one: (one.start, one.end)):
        if edit.start >= at:
            parts += [text[at : edit.start], edit.new]
            at = edit.end
    return "".join([*parts, text[at:]])


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
    span = document.lines(statements[0]).start, document.lines(statements[-1]).end
    has_strings = any(span[0] < at < span[1] for at in document.lines_in_strings)
    return document.has_own_lines(statements[0], statements[-1]) and not has_strings


def dedented(document: Document, statements: Sequence[ast.stmt], by: str) -> list[Edit]:
    """Return edits that dedent adjacent statements by ``by``, with the comments between and right above them."""
    first = statements[0].lineno
    while document.line(first - 1).strip().startswith("#"):
        first -= 1
    span = document.offset(first, 0), document.lines(statements[-1]).end
    return [
        Edit(start, start + len(by), "")
        for start in line_starts(document, *span)
        if document.text.startswith(by, start)
    ]


def indented(document: Document, statements: Sequence[ast.stmt], head: str) -> list[Edit]:
    """Return edits that indent adjacent statements below a new line ``head``."""
    span, by = (
        (document.lines(statements[0]).start, document.lines(statements[-1]).end),
        document.indent_unit(statements[0]),
    )
    return [above(document, statements[0], head), *(Edit(at, at, by) for at in line_starts(document, *span))]


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


_LINE = re.compile(r"^(?=[^\r\n])[^\r\n]*\S", re.MULTILINE)


def line_starts(document: Document, start: int, end: int) -> list[int]:
    """Return the offsets of the lines in a piece of text, except blank lines and lines inside of a string."""
    starts = (line.start() for line in _LINE.finditer(document.text, start, end))
    return [at for at in starts if at not in document.lines_in_strings]


# A new import

_FUTURE, _STANDARD, _INSTALLED, _OWN, _OTHER = range(5)
"""The sections of imports: ``from __future__``, standard library, installed packages, own package; other statements."""


def with_imported(text: str, name: str) -> str:
    """Return the text with ``import NAME`` in its conventional place, or unchanged if it has that import."""
    document = Document(text)
    body, newline = document.tree.body, document.newline
    if imports_of(body).get(name) == name:
        return text
    new = ast.Import([ast.alias(name)])
    first = int(ast.get_docstring(document.tree) is not None)
    place = next((index for index in range(first, len(body)) if _rank(body[index]) >= _rank(new)), len(body))
    above, below = body[:place], body[place:]
    line = f"import {name}{newline}"
    if below and _is_beside(below[0], new):
        at = document.lines(below[0]).start
    elif above:
        at = document.lines(above[-1]).end
        line = line if _is_beside(above[-1], new) else newline + line
    else:
        at = document.lines(below[0]).start
    if below and not _is_beside(below[0], new) and not text.startswith(newline, at):
        line += newline * (2 if isinstance(below[0], (*FUNCTIONS, ast.ClassDef)) else 1)
    return edited(text, [Edit(at, at, line)])


def _is_beside(statement: ast.stmt, new: ast.Import) -> bool:
    """True if a statement is an import of the same section."""
    return _rank(statement)[0] == _rank(new)[0]


def _rank(statement: ast.stmt) -> tuple[int, bool, str]:
    """Return the sort key of an import: section, ``import`` before ``from``, name. Other statements sort last."""
    match statement:
        case ast.Import(names=[first, *_]):
            root = first.name.partition(".")[0]
        case ast.ImportFrom(level=0, module=str(module)):
            root = module.partition(".")[0]
        case ast.ImportFrom():
            return _OWN, True, ""
        case _:
            return _OTHER, False, ""
    section = _STANDARD if root in sys.stdlib_module_names else _INSTALLED
    return _FUTURE if root == "__future__" else section, isinstance(statement, ast.ImportFrom), root
