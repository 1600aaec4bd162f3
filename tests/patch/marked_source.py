"""Fixtures whose pins stand in comments behind the lines: ``#! pin half: q, k; full: w``.

``#! pin`` pins a statement, ``#! call self.attn`` a call on that line, and ``#! forward`` behind a class its forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ampdbg.patch.edits import CallPin, FunctionPin, SourcePin, StatementPin

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name.removesuffix(".in.py") for path in FIXTURES.glob("*.in.py"))

_MARK = re.compile(r"[ ]+#! (pin|call|forward) ?(?P<callee>[\w.\[\]]+(?= |$))?(?P<names>.*)$")


def marked(name: str) -> tuple[str, list[SourcePin]]:
    """A fixture's source without its marks, and the pins that they stand for."""
    return without_marks((FIXTURES / f"{name}.in.py").read_text(encoding="utf-8"))


def without_marks(text: str) -> tuple[str, list[SourcePin]]:
    """The text without its marks, and the pins."""
    lines = text.split("\n")
    found = [(number, line, match) for number, line in enumerate(lines, 1) if (match := _MARK.search(line))]
    stripped = [_MARK.sub("", line) for line in lines]
    pins = [_pin(number, line, match, stripped) for number, line, match in found]
    return "\n".join(stripped), pins


def _pin(number: int, line: str, match: re.Match[str], lines: list[str]) -> SourcePin:
    names = dict(_names(match["names"] if match[1] != "pin" else line[match.end(1) :]))
    half, full = names.get("half", ()), names.get("full", ())
    if match[1] == "forward":
        return FunctionPin(re.split(r"[\s(:]", line)[1] + ".forward", half)
    function = _function(number, lines)
    half_on_line = {number: half} if half else ()
    if match[1] == "call":
        return CallPin(function, match["callee"], (number,), half_on_line, full)
    return StatementPin(function, (number,), half_on_line, full)


def _names(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for part in filter(None, text.split(";")):
        kind, _, names = part.partition(":")
        yield kind.strip(), tuple(name.strip() for name in names.split(","))


def _function(number: int, lines: list[str]) -> str:
    """The name of the function that a line stands in: the last ``def`` above it that is indented less."""
    indent = len(lines[number - 1]) - len(lines[number - 1].lstrip())
    for line in reversed(lines[: number - 1]):
        start = len(line) - len(line.lstrip())
        if line.strip() and start < indent:
            indent = start
            if match := re.match(r"\s*(?:async )?def (\w+)", line):
                return match[1]
    return ""
