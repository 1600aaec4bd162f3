"""A page as text for a terminal, drawn with rich."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import singledispatch

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding

from . import view
from .chart import BAR_WIDTH, exponent_bar, scale_chart
from .view import root_of

# Every character beyond ASCII that a report's own text uses, for terminals that cannot show them.
ASCII = str.maketrans(
    {"━": "=", "┃": "|", "─": "-", "┤": "|", "└": "+", "×": "x", "·": "-", "…": "...", "✓": "+", "✗": "x", "│": "|"}
    | {"↳": ">", **dict(zip("▁▂▃▄▅▆▇█", ".,:-=+*#", strict=True))}
)

MARKS: Mapping[view.Tone, str] = {"good": "✓", "bad": "✗", "doubtful": "?", "stopped": "!"}
"""What stands before a headline."""

STYLES: Mapping[view.Tone, str] = {
    "plain": "",
    "good": "green",
    "bad": "red",
    "doubtful": "yellow",
    "stopped": "yellow",
    "strong": "bold",
    "faint": "dim",
    "name": "cyan",
    "code": "green",
    "chart": "cyan",
}

SEVERITY_STYLE = {"error": "red", "warning": "yellow", "info": "cyan"}

INDENT = 2
NARROW = 70
"""In fewer columns a table leaves its spare columns out, so that words are not broken."""

CODE_SPAN = r"`[^`]+`"


def draw(page: view.Page, look: view.Look) -> str:
    """The page in ``look.width`` columns, with an empty line between sections.

    Only what is there to be copied is wider. ``unicode=False`` draws with ASCII alone.
    """
    console = Console(
        file=io.StringIO(),
        width=look.width,
        force_terminal=look.color,
        color_system="standard" if look.color else None,
        no_color=not look.color,
        force_jupyter=False,
        legacy_windows=False,
        emoji=False,
        markup=False,
        highlight=False,
        _environ={},
    )
    with console.capture() as capture:
        for number, part in enumerate(_parts(page, look.width)):
            if number:
                console.print()
            console.print(part, crop=False)
    text = "\n".join(row.rstrip() for row in capture.get().splitlines()) + "\n"
    return text if look.unicode else text.translate(ASCII)


def _parts(page: view.Page, width: int) -> Iterator[RenderableType]:
    if page.headline is not None:
        yield _headline(page.headline)
    yield from (Group(*_drawn(section, width)) for section in page.sections)
    last = list(_end(page))
    if last:
        yield Group(*last)


def _headline(headline: view.Headline) -> Text:
    return Text(f"{MARKS[headline.tone]} {headline.sentence}", style=f"bold {STYLES[headline.tone]}")


def _end(page: view.Page) -> Iterator[RenderableType]:
    yield from (Text(fact, style="dim") for fact in page.footer)
    if page.record_path:
        yield _verbatim(f"Record: {page.record_path}", "dim")
    if page.next_command is not None:
        yield Text.assemble(("Next: ", "bold"), page.next_command.why)
        yield _verbatim(page.next_command.command, "bold cyan", INDENT)


def _verbatim(text: str, style: str, by: int = 0) -> Text:
    """A chart row, or a command to copy: never wrapped, nor cut at the edge as in a padding; ``by`` moves it right."""
    return Text(" " * by + text, style=style, no_wrap=True, overflow="ignore")


def _indented(item: RenderableType, by: int = INDENT) -> Padding:
    return Padding(item, (0, 0, 0, by), expand=False)


def _line(one: view.Line, depth: int = 0) -> RenderableType:
    text = Text.assemble(*((words.text, STYLES[words.tone]) for words in one.words))
    if one.is_code:
        text.no_wrap, text.overflow = True, "ellipsis"
    by = INDENT * (one.depth + depth)
    return _indented(text, by) if by else text


def _title(title: str) -> Iterator[Text]:
    if title:
        yield Text(title, style="bold")


@singledispatch
def _drawn(section: view.Section, width: int) -> Iterator[RenderableType]:
    raise TypeError(f"got a section of {type(section).__name__}; each kind of view.Section has a function below")


@_drawn.register
def _lines(section: view.Paragraph, width: int) -> Iterator[RenderableType]:
    yield from _title(section.title)
    yield from (_line(one, depth=1 if section.title else 0) for one in section.lines)


@_drawn.register
def _snippet(section: view.Snippet, width: int) -> Iterator[RenderableType]:
    yield from _title(section.title)
    yield from (_verbatim(text, "green", INDENT) for text in section.lines)


@_drawn.register
def _chart(section: view.ScaleChart, width: int) -> Iterator[RenderableType]:
    yield from _title(section.title)
    yield from (_verbatim(row.text, STYLES[row.tone]) for row in scale_chart(section.steps, width))


@_drawn.register
def _table(section: view.Table, width: int) -> Iterator[RenderableType]:
    shown = [at for at, column in enumerate(section.columns) if width >= NARROW or not column.is_spare]
    yield from _title(section.title)
    yield from (_line(one, depth=1) for one in section.above)
    yield _indented(
        _grid([section.columns[at] for at in shown], [[row[at] for at in shown] for row in section.rows], width)
    )
    yield from (_line(one, depth=1) for one in section.below)


def _grid(columns: Sequence[view.Column], rows: Sequence[Sequence[view.Cell]], width: int) -> Grid:
    gap = 1 if any(column.kind == "histogram" for column in columns) else 2
    has_headings = any(column.heading for column in columns)
    grid = Grid(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_header=has_headings)
    for column in columns:
        if column.kind == "names":
            most = min(column.most, max(12, width // 3)) if column.most else None
            grid.add_column(column.heading, overflow="fold", max_width=most)
        else:
            heading = "2^-24" + "2^15".rjust(BAR_WIDTH - 6) if column.kind == "histogram" else column.heading
            grid.add_column(heading, justify="right" if column.kind == "number" else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*map(_cell, row))
    return grid


def _cell(cell: view.Cell) -> RenderableType:
    if isinstance(cell, view.Histogram):
        return Text(exponent_bar(cell), style="cyan")
    if isinstance(cell, str):
        return Text(cell)
    return _line(cell) if isinstance(cell, view.Line) else Group(*map(_line, cell))


@_drawn.register
def _findings(section: view.Findings, width: int) -> Iterator[RenderableType]:
    """Every finding that stands for itself, each with what follows from it in a line below."""
    findings = section.findings
    roots = [root_of(findings, index) for index in range(len(findings))]
    for index, finding in enumerate(findings):
        if roots[index] == index:
            yield from _finding(finding)
            yield from (_follow_up(findings[other]) for other, root in enumerate(roots) if root == index != other)


def _finding(finding: Finding) -> Iterator[RenderableType]:
    where = (part for part in (finding.module, finding.op, finding.parameter) if part)
    yield Text.assemble(
        (finding.severity, SEVERITY_STYLE[finding.severity]),
        " ",
        (finding.code, "bold"),
        f" · {' · '.join((f'step {finding.step}', finding.phase, *where))}",
    )
    yield _indented(Text(finding.message))
    if finding.source is not None:
        source = finding.source
        yield _indented(Text(f"{source.file}:{source.line} in {source.function}", style="dim"))
        yield _indented(Text(source.text.strip(), style="bold"), 2 * INDENT)
    if finding.remedy:
        yield _indented(Text.assemble(("Remedy: ", "green"), finding.remedy))
    if finding.code in CODES:
        yield _verbatim(f"ampdbg explain {finding.code}", "dim", INDENT)


def _follow_up(finding: Finding) -> RenderableType:
    return _indented(Text(f"└ then {finding.code} at step {finding.step}: {finding.message}", style="dim"))


@_drawn.register
def _prose(section: view.Prose, width: int) -> Iterator[RenderableType]:
    """Its blocks with an empty line between them, but none between items."""
    yield from _title(section.title)
    previous = ""
    for kind, text in blocks(section.markdown):
        if previous and not previous == kind == "item":
            yield Text()
        yield _indented(_block(kind, text))
        previous = kind


def _block(kind: str, text: str) -> RenderableType:
    if kind == "code":
        return _indented(_verbatim(text, "green"))
    prose = Text(text)
    prose.highlight_regex(CODE_SPAN, "cyan")
    if kind == "paragraph":
        return prose
    item = Grid.grid()
    item.add_column(width=INDENT)
    item.add_column()
    item.add_row("-", prose)
    return item


def blocks(markdown: str) -> Iterator[tuple[str, str]]:
    """The kind and the text of each block: a paragraph in one line, an item of a list, or code as it stands."""
    for number, part in enumerate(re.split(r"^```.*\n?", markdown, flags=re.MULTILINE)):
        if number % 2:
            yield "code", part.rstrip()
        else:
            for chunk in filter(None, map(str.strip, part.split("\n\n"))):
                yield from _joined(chunk)


def _joined(chunk: str) -> Iterable[tuple[str, str]]:
    if not chunk.startswith("- "):
        return [("paragraph", " ".join(chunk.split()))]
    return (("item", " ".join(item.split())) for item in re.split(r"^- ", chunk, flags=re.MULTILINE)[1:])
