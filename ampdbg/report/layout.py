"""The building blocks of the text report: titles, indented parts, lines that are never wrapped, tables."""

from __future__ import annotations

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

INDENT = 2


def title(text: str) -> Text:
    """The heading of a section."""
    return Text(text, style="bold")


def indented(item: RenderableType, by: int = INDENT) -> Padding:
    """Anything, moved to the right."""
    return Padding(item, (0, 0, 0, by), expand=False)


def verbatim(text: str, style: str, by: int = 0) -> Text:
    """A chart row, or a command to copy: never wrapped, nor cut at the edge as in a padding; ``by`` moves it right."""
    return Text(" " * by + text, style=style, no_wrap=True, overflow="ignore")


def table(first: str, *others: str) -> Table:
    """A table without lines: names to the left and folded where too long, numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name == "at" else "right", no_wrap=True)
    return table
