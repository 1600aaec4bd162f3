"""The list of all codes, and the explanation of one, as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampdbg.record.explanation import SECTIONS, Explanation

from .drawing import draw
from .layout import INDENT, indented, title, verbatim

TEXT_WIDTH = 80
"""Prose in longer lines is hard to read, however wide the terminal is."""

CODE_SPAN = r"`[^`]+`"


class Block(NamedTuple):
    """A part of a Markdown text: a paragraph in one line, an item of a list, or a fenced block of code as it stands."""

    kind: Literal["paragraph", "item", "code"]
    text: str


def render_listing(entries: Sequence[Explanation], *, width: int, color: bool, unicode: bool) -> str:
    """The codes by family, each with its title, and how to read more."""
    return draw(_listing(entries), width=width, color=color, unicode=unicode)


def render_explanation(entry: Explanation, *, width: int, color: bool, unicode: bool) -> str:
    """All there is to know about one code, in at most 80 columns."""
    return draw(_explained(entry), width=min(width, TEXT_WIDTH), color=color, unicode=unicode)


def _listing(entries: Sequence[Explanation]) -> Iterator[RenderableType]:
    longest = max(len(entry.code) for entry in entries)
    for family, members in groupby(entries, key=lambda entry: entry.family):
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(width=longest, style="cyan", no_wrap=True)
        rows.add_column()
        for entry in members:
            rows.add_row(entry.code, Text(entry.title))
        yield Group(title(family), indented(rows))
    yield Text.assemble("What one means, how it is decided and what fixes it: ", ("ampdbg explain CODE", "bold cyan"))


def _explained(entry: Explanation) -> Iterator[RenderableType]:
    yield Group(Text.assemble((entry.code, "bold cyan"), f" · {entry.family}"), title(entry.title))
    for field, heading in SECTIONS.items():
        yield Group(title(heading), *_body(tuple(blocks(getattr(entry, field)))))


def _body(parts: Sequence[Block]) -> Iterator[RenderableType]:
    """Blocks with an empty line between them, but none between items."""
    for before, part in zip((None, *parts), parts, strict=False):
        if before is not None and not before.kind == part.kind == "item":
            yield Text()
        yield indented(_drawn(part))


def _drawn(part: Block) -> RenderableType:
    if part.kind == "code":
        return indented(verbatim(part.text, "green"))
    prose = Text(part.text)
    prose.highlight_regex(CODE_SPAN, "cyan")
    if part.kind == "paragraph":
        return prose
    item = Table.grid()
    item.add_column(width=INDENT)
    item.add_column()
    item.add_row("-", prose)
    return item


def blocks(markdown: str) -> Iterator[Block]:
    """Splits what the explanations are written in: paragraphs, lists with ``-`` and fenced code."""
    for number, part in enumerate(re.split(r"^```.*\n?", markdown, flags=re.MULTILINE)):
        if number % 2:
            yield Block("code", part.rstrip())
        else:
            for chunk in filter(None, map(str.strip, part.split("\n\n"))):
                yield from _prose(chunk)


def _prose(chunk: str) -> Iterator[Block]:
    if not chunk.startswith("- "):
        yield Block("paragraph", " ".join(chunk.split()))
        return
    for item in re.split(r"^- ", chunk, flags=re.MULTILINE)[1:]:
        yield Block("item", " ".join(item.split()))
