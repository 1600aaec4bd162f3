"""Source files as LibCST reads them and back to bytes: encoding, byte order mark and line endings are kept."""

from __future__ import annotations

import difflib
import io
import tokenize
from dataclasses import dataclass

import libcst as cst


class EditError(Exception):
    """An edit that is refused; ``str(error)`` is the reason, ``line`` where (counted from 1; 0 is the whole file)."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class SourceText:
    """A file's text, the encoding that Python reads it in (``utf-8-sig`` with a byte order mark), and its tree."""

    text: str
    encoding: str
    module: cst.Module

    def with_module(self, edited: cst.Module) -> bytes:
        """The file with the edited tree. Lines that the edit left alone are the file's own, byte for byte.

        Raises:
            EditError: LibCST does not give the file's own lines back.
        """
        own, parsed = self.text.split("\n"), self.module.code.split("\n")
        if len(own) != len(parsed):
            raise EditError("its line endings cannot be kept; save it with LF or CRLF")
        # LibCST drops form feeds, and tabs in front of a comment: hence no line of its text that did not change.
        changes = difflib.SequenceMatcher(None, parsed, edited.code.split("\n"), autojunk=False).get_opcodes()
        after = edited.code.split("\n")
        lines = [
            line
            for kind, start, end, new_start, new_end in changes
            for line in (own[start:end] if kind == "equal" else after[new_start:new_end])
        ]
        return "\n".join(lines).encode(self.encoding)


def read_source(source: bytes) -> SourceText:
    """Decodes and parses a file.

    Raises:
        EditError: it is no Python that LibCST can parse, or not in the encoding that it claims.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        return SourceText(text, encoding, cst.parse_module(text))
    except cst.ParserSyntaxError as error:
        raise EditError(f"line {error.raw_line} does not parse", error.raw_line) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise EditError(f"it cannot be decoded: {error}") from None
