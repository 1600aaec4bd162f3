"""A source file parsed by LibCST: its statements by line, its functions, and its bytes after an edit."""

from __future__ import annotations

import difflib
import functools
import io
import itertools
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider

from ampdbg.source.expressions import Bindings, disables_autocast, dotted, find, imports_of, walk


class EditError(Exception):
    """A rejected edit. ``str(error)`` is the reason, ``line`` the location (counted from 1; 0 is the whole file)."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Located:
    """A line of simple statements and its location.

    ``bindings`` are the names of the innermost enclosing function. ``qualname`` lists all enclosing functions and
    classes, outermost first. ``is_off`` is True if a ``with`` or decorator there disables autocast for the line.
    """

    line: cst.SimpleStatementLine
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
    """A file's text, its encoding as Python detects it (``utf-8-sig`` with a byte order mark), and its tree."""

    text: str
    encoding: str
    module: cst.Module

    @functools.cached_property
    def _positions(self) -> Mapping[cst.CSTNode, CodeRange]:
        return MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)

    @functools.cached_property
    def _parents(self) -> Mapping[cst.CSTNode, cst.CSTNode]:
        return MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(ParentNodeProvider)

    @functools.cached_property
    def _statements(self) -> Mapping[int, cst.CSTNode]:
        """The innermost statement on each line, or the statements after a colon on that line."""
        kinds = (cst.SimpleStatementLine, cst.SimpleStatementSuite, cst.BaseCompoundStatement)
        statements = (node for node in walk(self.module) if isinstance(node, kinds))
        return {number: node for node in statements for number in self.span(node)}

    def with_module(self, edited: cst.Module) -> bytes:
        """Return the file with the edited tree. Unedited lines keep their original bytes.

        Raises:
            EditError: LibCST does not reproduce the file's own lines.
        """
        own, parsed = self.text.split("\n"), self.module.code.split("\n")
        if len(own) != len(parsed):
            raise EditError("its line endings cannot be kept; save it with LF or CRLF")
        # LibCST drops form feeds, and tabs before a comment, so take unchanged lines from the file.
        after = edited.code.split("\n")
        changes = difflib.SequenceMatcher(None, parsed, after, autojunk=False).get_opcodes()
        lines = [
            line
            for kind, start, end, new_start, new_end in changes
            for line in (own[start:end] if kind == "equal" else after[new_start:new_end])
        ]
        return "\n".join(lines).encode(self.encoding)

    def at(self, number: int) -> Located:
        """Return the statement on a line (counted from 1).

        Raises:
            EditError: the line has no statement, or a statement of an unsupported kind.
        """
        count = io.StringIO(self.text, newline=None).read().count("\n") + 1  # as Python counts lines
        if not 1 <= number <= count:
            raise EditError(f"the file has {count} lines", number)
        statement = self._statements.get(number)
        if statement is None:
            raise EditError("no statement is there, only a blank line, a comment or a decorator", number)
        if isinstance(statement, cst.SimpleStatementSuite):
            raise EditError("it follows a colon; put it on its own line first", number)
        if not isinstance(statement, cst.SimpleStatementLine):
            reason = "it is the head of a compound statement; compute what it needs on its own line first"
            raise EditError(reason, number)
        around = list(self._around(statement))
        functions = [node for node in around if isinstance(node, cst.FunctionDef)]
        bodies = (self.module.body, *(function.body.body for function in reversed(functions)))
        imports = {name: origin for body in bodies for name, origin in imports_of(body).items()}
        within = around[: around.index(functions[0]) + 1] if functions else around
        is_off = any(disables_autocast(node, imports) for node in within)
        return Located(statement, self.span(statement), self.qualname(statement), self.bindings(statement), is_off)

    def bindings(self, node: cst.CSTNode) -> Bindings:
        """Return the names of the innermost function around a node."""
        around = (one for one in self._around(node) if isinstance(one, cst.FunctionDef))
        return Bindings(self.module, next(around, None))

    def above(self, number: int) -> list[int]:
        """Return the first lines of the statements above the given line in its block, nearest first; see :meth:`at`."""
        line = self.at(number).line
        suite = self._parents[line]
        body: Sequence[cst.CSTNode] = suite.body if isinstance(suite, (cst.Module, cst.IndentedBlock)) else ()
        return [self.span(node)[0] for node in reversed(body[: body.index(line)])]

    def calls_in(self, function: str, callee: str) -> tuple[int, ...]:
        """Return the lines that call ``callee`` in the function of this qualified name, without inner functions."""
        calls = (call for call in find(self.module, cst.Call) if dotted(call.func) == callee)
        return tuple(self.span(call)[0] for call in calls if self.qualname(call) == parts_of(function))

    def loop_around(self, line: cst.SimpleStatementLine) -> cst.BaseStatement:
        """Return the outermost loop around a line in the same function, or the line itself if there is none."""
        around = itertools.takewhile(lambda item: not isinstance(item, cst.FunctionDef), self._around(line))
        return [line, *(item for item in around if isinstance(item, (cst.For, cst.While)))][-1]

    def qualname(self, node: cst.CSTNode) -> tuple[str, ...]:
        """Return the names of the functions and classes around a node, outermost first."""
        around = [item for item in self._around(node) if isinstance(item, (cst.FunctionDef, cst.ClassDef))]
        return tuple(item.name.value for item in reversed(around))

    def _around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        while (above := self._parents.get(node)) is not None:
            yield (node := above)

    def span(self, node: cst.CSTNode) -> range:
        position = self._positions[node]
        return range(position.start.line, position.end.line + 1)


@functools.lru_cache(maxsize=16)
def read_source(source: bytes) -> SourceFile:
    """Decode and parse a file.

    Raises:
        EditError: LibCST cannot parse the file, or the file is not in its declared encoding.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise EditError(f"line {error.raw_line} does not parse", error.raw_line) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise EditError(f"it cannot be decoded: {error}") from None
    return SourceFile(text, encoding, module)


def parts_of(function: str) -> tuple[str, ...]:
    """Return ``("Block", "forward")`` for ``Block.forward`` and for ``Block.forward.<locals>.<lambda>``."""
    # Comprehensions and lambdas have their own frames, but the enclosing function is needed here.
    return tuple(part for part in function.split(".") if part and not part.startswith("<"))
