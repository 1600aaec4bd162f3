"""A source file as LibCST reads it: its statements by line, its functions, and its bytes again after an edit."""

from __future__ import annotations

import difflib
import functools
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from ampdbg.source.imports import disables_autocast, imports_of


class EditError(Exception):
    """An edit that is refused; ``str(error)`` is the reason, ``line`` where (counted from 1; 0 is the whole file)."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Surroundings:
    """Where a statement stands: ``functions`` and ``classes`` around it, the outermost first.

    ``is_off`` where autocast is off around it within its function, by a ``with`` or the function's decorator.
    """

    qualname: tuple[str, ...] = ()
    functions: tuple[cst.FunctionDef, ...] = ()
    is_off: bool = False

    @property
    def function(self) -> cst.FunctionDef | None:
        """The innermost function."""
        return self.functions[-1] if self.functions else None

    def is_in(self, function: str) -> bool:
        """Whether ``function`` is this one's name, or qualified name with or without ``<locals>``."""
        asked = parts_of(function)
        return self.qualname[len(self.qualname) - len(asked) :] == asked


@dataclass(frozen=True)
class Located:
    """A line of simple statements, and where it stands."""

    line: cst.SimpleStatementLine
    place: Surroundings
    span: range


@dataclass(frozen=True)
class SourceFile:
    """A file's text, the encoding that Python reads it in (``utf-8-sig`` with a byte order mark), and its tree.

    ``imports`` are those of the top level: local name to dotted name.
    """

    text: str
    encoding: str
    module: cst.Module
    imports: Mapping[str, str]

    @functools.cached_property
    def lines(self) -> Sequence[str]:
        """The lines, as Python counts them."""
        return io.StringIO(self.text, newline=None).read().split("\n")

    @functools.cached_property
    def positions(self) -> Mapping[cst.CSTNode, CodeRange]:
        """Where each node stands."""
        return MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)

    def with_module(self, edited: cst.Module) -> bytes:
        """The file with the edited tree. Lines that the edit left alone are the file's own, byte for byte.

        Raises:
            EditError: LibCST does not give the file's own lines back.
        """
        own, parsed = self.text.split("\n"), self.module.code.split("\n")
        if len(own) != len(parsed):
            raise EditError("its line endings cannot be kept; save it with LF or CRLF")
        # LibCST drops form feeds, and tabs in front of a comment: hence no line of its text that did not change.
        after = edited.code.split("\n")
        changes = difflib.SequenceMatcher(None, parsed, after, autojunk=False).get_opcodes()
        lines = [
            line
            for kind, start, end, new_start, new_end in changes
            for line in (own[start:end] if kind == "equal" else after[new_start:new_end])
        ]
        return "\n".join(lines).encode(self.encoding)

    def at(self, number: int) -> Located:
        """The statement on a line (counted from 1).

        Raises:
            EditError: there is none, or it is of a kind that is left alone.
        """
        if not 1 <= number <= len(self.lines):
            raise EditError(f"the file has {len(self.lines)} lines", number)
        try:
            found = self._in_body(self.module.body, Surroundings(), number)
        except EditError as error:
            raise EditError(str(error), number) from None
        if found is None:
            raise EditError("no statement is there, only a blank line, a comment or a decorator", number)
        return found

    def span(self, node: cst.CSTNode) -> range:
        """The lines of a node."""
        position = self.positions.get(node)
        if position is None:
            return range(0)  # made by an edit
        return range(position.start.line, position.end.line + 1)

    def _in_body(self, body: Sequence[cst.CSTNode], place: Surroundings, number: int) -> Located | None:
        for statement in body:
            if number in self.span(statement):
                return self._in_statement(statement, place, number)
        return None

    def _in_statement(self, statement: cst.CSTNode, place: Surroundings, number: int) -> Located:
        if isinstance(statement, cst.SimpleStatementLine):
            return Located(statement, place, self.span(statement))
        for suite, within in _suites(statement, self._inside(statement, place)):
            if isinstance(suite, cst.IndentedBlock):
                if (found := self._in_body(suite.body, within, number)) is not None:
                    return found
            elif number in self.span(suite):
                raise EditError("it stands behind a colon; put it on a line of its own first")
        raise EditError("it is the head of a compound statement; compute what it needs on a line of its own first")

    def _inside(self, statement: cst.CSTNode, place: Surroundings) -> Surroundings:
        """The place of what stands in the body of a compound statement."""
        if isinstance(statement, cst.FunctionDef):
            is_off = any(disables_autocast(item.decorator, self.imports) for item in statement.decorators)
            functions = (*place.functions, statement)
            return Surroundings((*place.qualname, statement.name.value), functions, is_off)
        if isinstance(statement, cst.ClassDef):
            return replace(place, qualname=(*place.qualname, statement.name.value))
        if isinstance(statement, cst.With) and any(disables_autocast(i.item, self.imports) for i in statement.items):
            return replace(place, is_off=True)
        return place


@functools.lru_cache(maxsize=16)
def read_source(source: bytes) -> SourceFile:
    """Decodes and parses a file.

    Raises:
        EditError: it is no Python that LibCST can parse, or not in the encoding that it claims.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise EditError(f"line {error.raw_line} does not parse", error.raw_line) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise EditError(f"it cannot be decoded: {error}") from None
    return SourceFile(text, encoding, module, imports_of(module.body))


def parts_of(function: str) -> tuple[str, ...]:
    """``("Block", "forward")`` of ``Block.forward`` and of ``Block.forward.<locals>.<lambda>``."""
    # Comprehensions and lambdas have frames of their own; what counts is the function around them.
    return tuple(part for part in function.split(".") if part and not part.startswith("<"))


def functions_in(node: cst.CSTNode, around: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], cst.FunctionDef]]:
    """The functions below ``node`` with their qualified names, in parts."""
    for child in node.children:
        if not isinstance(child, (cst.FunctionDef, cst.ClassDef)):
            yield from functions_in(child, around)
            continue
        qualname = (*around, child.name.value)
        if isinstance(child, cst.FunctionDef):
            yield qualname, child
        yield from functions_in(child, qualname)


def _suites(statement: cst.CSTNode, place: Surroundings) -> Iterator[tuple[cst.BaseSuite, Surroundings]]:
    """The bodies of a compound statement, those of its ``else``, ``except`` and ``case`` too."""
    for child in statement.children:
        if isinstance(child, cst.BaseSuite):
            yield child, place
        elif not isinstance(child, (cst.BaseExpression, cst.Decorator)):
            yield from _suites(child, place)
