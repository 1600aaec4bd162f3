"""Unified diffs as ``git apply`` and ``patch -p1`` take them, byte for byte."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import PurePosixPath

CONTEXT = 3
"""Unchanged lines around a change, as git has it."""

NO_NEWLINE = b"\\ No newline at end of file\n"
DEV_NULL = b"/dev/null"

_HEADING = re.compile(rb"^[ \t]*(class|async[ \t]+def|def)[ \t].*$")
_RANGE = re.compile(rb"@@ -(\d+)")
_ESCAPES = {
    byte: b"\\" + letter for byte, letter in zip(b'"\\\a\b\t\n\v\f\r', map(str.encode, '"\\abtnvfr'), strict=True)
}


def unified_diff(path: PurePosixPath, before: bytes, after: bytes) -> bytes:
    """The change of one file; empty where there is none.

    The lines are the file's own bytes, whatever its encoding and line endings, so the diff must be written to a binary
    stream.

    Args:
        path: relative to where the diff is applied.
        before: the file's bytes, and ``after`` those that it shall have.
        after: see ``before``.
    """
    if before == after:
        return b""
    return _header(path, is_new=False) + b"".join(_hunks(_lines(before), _lines(after)))


def new_file_diff(path: PurePosixPath, content: bytes) -> bytes:
    """A diff that makes a file; applied in reverse it removes it."""
    return _header(path, is_new=True) + b"".join(_hunks([], _lines(content)))


def _header(path: PurePosixPath, *, is_new: bool) -> bytes:
    old, new = _quoted("a/", path), _quoted("b/", path)
    # A tab ends a name with spaces, which patch would otherwise cut at the first.
    end = b"\t\n" if " " in str(path) else b"\n"
    if is_new:
        return b"diff --git %b %b\nnew file mode 100644\n--- %b\n+++ %b%b" % (old, new, DEV_NULL, new, end)
    return b"diff --git %b %b\n--- %b%b+++ %b%b" % (old, new, old, end, new, end)


def _quoted(prefix: str, path: PurePosixPath) -> bytes:
    """A path as git writes it: as in C, with quotes and octal numbers, where it holds more than plain characters."""
    name = (prefix + path.as_posix()).encode("utf-8", "surrogateescape")
    escaped = b"".join(_ESCAPES.get(byte, bytes([byte]) if 32 <= byte < 127 else b"\\%03o" % byte) for byte in name)
    return name if escaped == name else b'"' + escaped + b'"'


def _lines(content: bytes) -> list[bytes]:
    """Lines end at a line feed and nowhere else: a form feed or a lone carriage return is part of a line."""
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", content)


def _hunks(before: Sequence[bytes], after: Sequence[bytes]) -> Iterator[bytes]:
    """The hunks, each headed by the class or function above it."""
    # The two lines that name the files come first; git's have more to say.
    for line in islice(difflib.diff_bytes(difflib.unified_diff, before, after, n=CONTEXT), 2, None):
        if (start := _RANGE.match(line)) is not None:
            above = reversed(before[: max(int(start[1]) - 1, 0)])
            heading = next((other for other in above if _HEADING.match(other)), b"").strip()
            yield b" ".join(part for part in (line.strip(), heading) if part) + b"\n"
        else:
            yield line if line.endswith(b"\n") else line + b"\n" + NO_NEWLINE
