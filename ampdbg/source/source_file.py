"""A source file that a patch edits: its statements by line, the functions around them, and its encoding."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import tokenize
from dataclasses import dataclass

from ampdbg.source.document import FUNCTIONS, LOOPS, Document
from ampdbg.source.names import Bindings, disables_autocast, dotted, imports_of
from ampdbg.syntax_tree import UNPARSABLE


class EditError(Exception):
    """A rejected edit. ``str(error)`` is the reason, ``line`` the location (counted from 1; 0 is the whole file)."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Located:
    """A simple statement on lines of its own, and its location.

    ``bindings`` are the names of the innermost enclosing function. ``qualname`` lists all enclosing functions and
    classes, outermost first. ``is_off`` is True if a ``with`` or decorator there disables autocast for the line.
    """

    statement: ast.stmt
    span: range
    qualname: tuple[str, ...]
    bindings: Bindings
    is_off: bool

    def is_in(self, function: str) -> bool:
        """True if ``function`` names the enclosing function, simple or qualified, with or without ``<locals>``."""
        asked = parts_of(function)
        return self.qualname[len(self.qualname) - len(asked) :] == asked

    def is_below(self, function: str) -> bool:
        """True if the line is in the function of this qualified name, or in a function in it."""
        asked = parts_of(function)
        return self.qualname[: len(asked)] == asked


@dataclass(frozen=True)
class SourceFile:
    """A file's document, and its encoding as Python detects it (``utf-8-sig`` with a byte order mark)."""

    document: Document
    encoding: str

    def at(self, number: int) -> Located:
        """Return the statement on a line (counted from 1).

        Raises:
            EditError: the line has no statement, or one that is compound or shares its lines.
        """
        document = self.document
        count = len(re.findall(r"\r\n|\r|\n", document.text)) + 1  # as Python counts lines
        if not 1 <= number <= count:
            raise EditError(f"the file has {count} lines", number)
        statement = document.statements.get(number)
        if statement is None:
            raise EditError("no statement is there, only a blank line, a comment or a decorator", number)
        if hasattr(statement, "body") or isinstance(statement, ast.Match):
            reason = "it is the head of a compound statement; compute what it needs on its own line first"
            raise EditError(reason, number)
        if not document.has_own_lines(statement):
            first = next(one for one in document.block(statement) if one.lineno == statement.lineno)
            is_behind_colon = document.text[: document.span(first).start].rstrip(" \t").endswith(":")
            reason = "it follows a colon; put it on its own line first" if is_behind_colon else SEVERAL
            raise EditError(reason, number)
        around = list(document.around(statement))
        functions = [node for node in around if isinstance(node, FUNCTIONS)]
        bodies = (document.tree.body, *(function.body for function in reversed(functions)))
        imports = {name: origin for body in bodies for name, origin in imports_of(body).items()}
        within = around[: around.index(functions[0]) + 1] if functions else around
        is_off = any(disables_autocast(node, imports) for node in within)
        return Located(statement, span(statement), self.qualname(statement), self.bindings(statement), is_off)

    def bindings(self, node: ast.AST) -> Bindings:
        """Return the names of the innermost function around a node."""
        return Bindings(self.document.tree, self.document.function(node))

    def above(self, number: int) -> list[int]:
        """Return the first lines of the statements above the given line in its block, nearest first; see :meth:`at`."""
        statement = self.at(number).statement
        block = self.document.block(statement)
        return [one.lineno for one in reversed(block[: block.index(statement)])]

    def calls_in(self, function: str, callee: str) -> tuple[int, ...]:
        """Return the lines that call ``callee`` in the function of this qualified name, without inner functions."""
        calls = (call for call in self.document.calls if dotted(call.func) == callee)
        return tuple(call.lineno for call in calls if self.qualname(call) == parts_of(function))

    def loop_around(self, statement: ast.stmt) -> ast.stmt:
        """Return the outermost loop around a statement in its function, or the statement itself if there is none."""
        around = itertools.takewhile(lambda item: not isinstance(item, FUNCTIONS), self.document.around(statement))
        return [statement, *(item for item in around if isinstance(item, LOOPS))][-1]

    def qualname(self, node: ast.AST) -> tuple[str, ...]:
        """Return the names of the functions and classes around a node, outermost first."""
        around = (one for one in self.document.around(node) if isinstance(one, (*FUNCTIONS, ast.ClassDef)))
        return tuple(reversed([one.name for one in around]))


SEVERAL = "the line holds several statements; put each on its own line first"


def span(node: ast.stmt) -> range:
    """Return the lines of a statement, without decorators."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@functools.lru_cache(maxsize=16)
def read_source(source: bytes) -> SourceFile:
    """Decode and parse a file.

    Raises:
        EditError: Python cannot parse the file, or the file is not in its declared encoding.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise EditError(f"it cannot be decoded: {error}") from None
    try:
        return SourceFile(Document(text), encoding)
    except UNPARSABLE as error:
        raise EditError(f"it does not parse: {error}", getattr(error, "lineno", None) or 0) from None


def parts_of(function: str) -> tuple[str, ...]:
    """Return ``("Block", "forward")`` for ``Block.forward`` and for ``Block.forward.<locals>.<lambda>``."""
    # Comprehensions and lambdas have their own frames, but the enclosing function is needed here.
    return tuple(part for part in function.split(".") if part and not part.startswith("<"))
