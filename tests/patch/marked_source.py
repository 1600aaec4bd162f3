"""Fixtures whose pins stand in comments behind the lines: ``#! pin half: q, k; full: w``.

``#! pin`` pins a statement, ``#! call self.attn`` a call on that line, and ``#! forward`` behind a class its forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ampdbg.patch.edits import FunctionPin, LinePin, SourcePin
from ampdbg.patch.regions import NamesSeen

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name.removesuffix(".in.py") for path in FIXTURES.glob("*.in.py"))

_MARK = re.compile(r"[ ]+#! (pin|call|forward) ?(?P<callee>[\w.\[\]]+(?= |$))?(?P<names>.*)$")


def marked(name: str) -> tuple[str, list[SourcePin], NamesSeen]:
    """A fixture's source without its marks, the pins that they stand for, and what a trace saw."""
    return without_marks((FIXTURES / f"{name}.in.py").read_text(encoding="utf-8"))


def without_marks(text: str) -> tuple[str, list[SourcePin], NamesSeen]:
    """The text without its marks, the pins, and the names."""
    lines = text.split("\n")
    found = [(number, line, match) for number, line in enumerate(lines, 1) if (match := _MARK.search(line))]
    stripped = [_MARK.sub("", line) for line in lines]
    pins = [_pin(number, line, match, stripped) for number, line, match in found]
    half: dict[int, tuple[str, ...]] = {}
    full: dict[int, tuple[str, ...]] = {}
    for number, line, match in found:
        names = dict(_names(match["names"] if match[1] != "pin" else line[match.end(1) :]))
        for kind, seen in (("half", half), ("full", full)):
            if kind in names:
                seen[_first_line(number, match, stripped)] = names[kind]
    return "\n".join(stripped), pins, NamesSeen(half, full)


def _pin(number: int, line: str, match: re.Match[str], lines: list[str]) -> SourcePin:
    if match[1] == "forward":
        return FunctionPin(re.split(r"[\s(:]", line)[1] + ".forward")
    return LinePin(_function(number, lines), (number,), match["callee"] or "")


def _first_line(number: int, match: re.Match[str], lines: list[str]) -> int:
    """Where the names of a mark were seen: on its line, or in the forward of the class that it stands behind."""
    if match[1] != "forward":
        return number
    return next((place for place in range(number, len(lines)) if "def forward" in lines[place - 1]), number)


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
