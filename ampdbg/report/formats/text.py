"""A page as text for a terminal, drawn with rich."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from ampdbg import quantities
from ampdbg.formats import FLOAT16, Exponents
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Step
from ampdbg.report import view
from ampdbg.report.formats import page_of

# Every character beyond ASCII that a report's own text uses, for terminals that cannot show them.
ASCII = str.maketrans(
    {"━": "=", "┃": "|", "─": "-", "┤": "|", "└": "+", "×": "x", "·": "-", "…": "...", "✓": "+", "✗": "x", "│": "|"}
    | {"↳": ">", **dict(zip("▁▂▃▄▅▆▇█", ".,:-=+*#", strict=True))}
)

SIGNS: Mapping[view.Tone, str] = {"good": "✓", "bad": "✗", "doubtful": "?", "warning": "!"}
"""The sign before a headline."""

STYLES: Mapping[view.Tone, str] = {
    "plain": "",
    "good": "green",
    "bad": "red",
    "doubtful": "yellow",
    "warning": "yellow",
    "strong": "bold",
    "faint": "dim",
    "name": "cyan",
    "chart": "cyan",
}

INDENT = 2
NARROW = 70
"""With fewer columns a table leaves its spare columns out, so that words are not broken."""

CODE_SPAN = r"`[^`]+`"

MOST_IN_BRIEF = 3
"""The most findings after the first that have a line in a story (the brief form of a page)."""

MOST_NOTES_IN_FULL = 2
"""With more notes than this, a story cuts each to one line: it must fit a screen."""


def write(record: Record, typed: view.CommandContext, look: view.Look) -> str:
    """Return the record's page: its story, or the whole page if ``verbose``."""
    return draw(page_of(record, typed), look, is_brief=not typed.verbose)


def draw(page: view.Page, look: view.Look, *, is_brief: bool = False) -> str:
    """Return the page in ``look.width`` columns, an empty line between sections; ``is_brief`` draws only its story.

    Only text to copy is wider. ``unicode=False`` draws with ASCII alone.
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
    is_story = is_brief and _leaves_out(page)
    parts: list[RenderableType] = []
    if page.headline is not None:
        head = f"{SIGNS[page.headline.tone]} {page.headline.sentence}"
        parts.append(Text(head, style=f"bold {STYLES[page.headline.tone]}"))
    for section in page.story if is_story else page.sections:
        title = [Text(section.title, style="bold")] * bool(section.title)
        parts.append(Group(*title, *_drawn(section, look.width)))
    end = list(_end(page, is_brief=is_story))
    parts += [Group(*end)] * bool(end)
    with console.capture() as capture:
        for number, part in enumerate(parts):
            if number:
                console.print()
            console.print(part, crop=False)
    text = "\n".join(row.rstrip() for row in capture.get().splitlines()) + "\n"
    return text if look.unicode else text.translate(ASCII)


def _leaves_out(page: view.Page) -> bool:
    """True if the story shows less than the sections; a brief list of the findings may leave none out."""
    brief = [one for one in page.story if isinstance(one, view.Findings)]
    groups = [list(view.with_effects(one.findings)) for one in brief]
    is_cut = any(len(every) != 1 or len(every[0][1]) > 1 for every in groups)
    shown = [*page.story, *(replace(one, is_brief=False) for one in brief * (not is_cut))]
    return bool(page.story) and any(section not in shown for section in page.sections)


def _end(page: view.Page, *, is_brief: bool) -> Iterator[RenderableType]:
    notes = [fact for fact in page.footer if fact.startswith("Note: ")]
    cut = notes if is_brief and len(notes) > MOST_NOTES_IN_FULL else ()
    for fact in page.footer:
        yield Text(fact, style="dim", no_wrap=fact in cut, overflow="ellipsis" if fact in cut else "fold")
    details = ("Details: ampdbg report {} -v",) * is_brief
    said = ("Record: {}", *details) if page.record_path else ()
    yield from (_verbatim(line.format(page.record_path), "dim") for line in said)
    if page.next_command is not None:
        yield Text.assemble(("Next: ", "bold"), page.next_command.why)
        yield _verbatim(page.next_command.command, "bold cyan", INDENT)


def _verbatim(text: str, style: str, by: int = 0) -> Text:
    """Return a chart row or a command to copy, moved right by ``by``; unlike a padding it is never wrapped or cut."""
    return Text(" " * by + text, style=style, no_wrap=True, overflow="ignore")


def _indented(item: RenderableType, by: int = INDENT) -> Padding:
    return Padding(item, (0, 0, 0, by), expand=False)


def _line(one: view.StyledLine, depth: int = 0) -> RenderableType:
    text = Text.assemble(*((words.text, STYLES[words.tone]) for words in one.words))
    if one.is_code:
        text.no_wrap, text.overflow = True, "ellipsis"
    by = INDENT * (one.depth + depth)
    return _indented(text, by) if by else text


def _drawn(section: view.Section, width: int) -> Iterator[RenderableType]:
    match section:
        case view.Paragraph():
            return (_line(one, depth=1 if section.title else 0) for one in section.lines)
        case view.Snippet():
            return (_verbatim(text, "green", INDENT) for text in section.lines)
        case view.ScaleChart():
            return (_verbatim(row.text, STYLES[row.tone]) for row in scale_chart(section.steps, width))
        case view.Table():
            return _table(section, width)
        case view.Findings():
            return _findings(section)
        case view.Prose():
            return _prose(section.markdown)


def _table(section: view.Table, width: int) -> Iterator[RenderableType]:
    shown = [at for at, column in enumerate(section.columns) if width >= NARROW or not column.is_spare]
    columns = [section.columns[at] for at in shown]
    gap = 1 if any(column.kind == "histogram" for column in columns) else 2
    has_headings = any(column.heading for column in columns)
    grid = Grid(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_header=has_headings)
    for column in columns:
        if column.kind == "names":
            most = min(column.most, max(12, width // 3)) if column.most else None
            grid.add_column(column.heading, overflow="fold", max_width=most)
        else:
            heading = "2^-24" + "2^15".rjust(BAR_WIDTH - 6) if column.kind == "histogram" else column.heading
            grid.add_column(heading, justify="right" if column.kind in view.RIGHT else "left", no_wrap=True)
    for row in section.rows:
        grid.add_row(*(_cell(row[at]) for at in shown))
    yield from (_line(one, depth=1) for one in section.above)
    yield _indented(grid)
    yield from (_line(one, depth=1) for one in section.below)


def _cell(cell: view.Cell) -> RenderableType:
    if isinstance(cell, Exponents):
        return Text(exponent_bar(cell), style="cyan")
    if isinstance(cell, str):
        return Text(cell)
    return _line(cell) if isinstance(cell, view.StyledLine) else Group(*map(_line, cell))


def _findings(section: view.Findings) -> Iterator[RenderableType]:
    """Yield every finding without a root, each with its effects in lines below."""
    groups = list(view.with_effects(section.findings))
    for finding, effects in groups[: 1 if section.is_brief else None]:
        yield from _finding(finding)
        is_cut = section.is_brief and len(effects) > 1  # several that must share a screen are cut to a line each
        for effect in effects:
            said = f"└ {view.conjunction(finding, effect)} {effect.code} at {effect.at_step}: {effect.message}"
            yield _indented(Text(said, "dim", no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold"))
    if section.is_brief:
        for finding, _ in groups[1 : 1 + MOST_IN_BRIEF]:
            style = STYLES[view.TONES[finding.severity]]
            parts = (finding.severity, f"bold {style}"), " ", (finding.code, style), f" · {finding.message}"
            yield Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
        yield from map(_line, view.more(len(groups) - 1 - MOST_IN_BRIEF, "finding"))


def _finding(finding: Finding) -> Iterator[RenderableType]:
    yield Text.assemble(
        (finding.severity, STYLES[view.TONES[finding.severity]]),
        " ",
        (finding.code, "bold"),
        f" · {' · '.join(finding.where)}",
    )
    yield _indented(Text(finding.message))
    for before, source in view.places(finding):
        yield _indented(Text(f"{before}{source.file}:{source.line} in {source.function}", style="dim"))
        yield _indented(Text(source.text.strip(), style="bold"), 2 * INDENT)
    if finding.remedy:
        yield _indented(Text.assemble(("Remedy: ", "green"), finding.remedy))
    if finding.code in CODES:
        yield _verbatim(f"ampdbg explain {finding.code}", "dim", INDENT)


def _prose(markdown: str) -> Iterator[RenderableType]:
    """Yield the blocks with an empty line between them, except between items."""
    previous = ""
    for kind, text in blocks(markdown):
        if previous and not previous == kind == "item":
            yield Text()
        previous = kind
        prose, item = Text(text), Grid.grid()
        prose.highlight_regex(CODE_SPAN, "cyan")
        item.add_column(width=INDENT)
        item.add_row("-", prose)
        block: Mapping[str, RenderableType] = {"paragraph": prose, "item": item, "code": _verbatim(text, "green")}
        yield _indented(block[kind], 2 * INDENT if kind == "code" else INDENT)


def blocks(markdown: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each block: a paragraph in one line, an item of a list, or code unchanged."""
    for number, part in enumerate(re.split(r"^```.*\n?", markdown, flags=re.MULTILINE)):
        if number % 2:
            yield "code", part.rstrip()
            continue
        for chunk in part.split("\n\n"):
            paragraph, *items = (" ".join(text.split()) for text in re.split(r"^- ", chunk, flags=re.MULTILINE))
            yield from [("paragraph", paragraph)] if paragraph else []
            yield from (("item", item) for item in items)


# The loss scale over the steps

MAX_ROWS = 8
MAX_STRETCH = 3
MARGIN = 2
STEP_AXIS = "step"

# The range of float32, in which the scaler keeps its scale; a scale of 0 is drawn at the bottom.
LOWEST_LEVEL, HIGHEST_LEVEL = -150, 128


ChartMark = tuple[view.Tone, str, str, Callable[[Step], bool]]
"""A mark under the axis: its tone, name and glyph, and a predicate for the steps that it marks."""

CHART_MARKS: tuple[ChartMark, ...] = (
    ("doubtful", "skipped", "×", lambda step: step.skipped),
    ("bad", "loss inf/NaN", "!", lambda step: not math.isfinite(step.loss)),
)


def scale_chart(steps: Sequence[Step], width: int) -> list[view.Words]:
    """Draw ``steps`` (at least one) within ``width`` characters; long runs share columns, short runs are stretched."""
    levels = [_level(step.scale) for step in steps]
    height = math.ceil((max(levels) - min(levels) + 1) / MAX_ROWS)
    tops = range(max(levels), min(levels) - 1, -height)
    labels = [quantities.scale(math.ldexp(1.0, top)) for top in tops]
    marks = [mark for mark in CHART_MARKS if any(map(mark[-1], steps))]
    gutter = MARGIN + max(map(len, [*labels, *(name for _, name, *_ in marks), STEP_AXIS]))
    room = max(8, width - gutter - 2)
    columns = _columns(steps, room)
    stretch = max(1, min(MAX_STRETCH, room // len(columns)))
    plot = ["".join(_level_cell(column, top, top - height + 1) * stretch for column in columns) for top in tops]
    glyphs = ((glyph if any(map(applies, column)) else " " for column in columns) for *_, glyph, applies in marks)
    under = ["".join(glyph.ljust(stretch) for glyph in row) for row in glyphs]
    drawn = len(columns) * stretch
    rows: list[tuple[view.Tone, str]] = [
        *(("chart", f"{label:>{gutter}} ┤{cells}") for label, cells in zip(labels, plot, strict=True)),
        ("faint", f"{'':>{gutter}} └{'─' * drawn}"),
        *((tone, f"{name:>{gutter}}  {cells}") for (tone, name, *_), cells in zip(marks, under, strict=True)),
        ("faint", f"{STEP_AXIS:>{gutter}}  {_ticks(steps, drawn)}"),
    ]
    return [view.Words(text.rstrip(), tone) for tone, text in rows]


def _columns(steps: Sequence[Step], most: int) -> list[list[Step]]:
    """Return the steps by time. Steps that a long run has left out are shown as the healthy step before them."""
    first, ran = steps[0].step, max(1, steps[-1].step - steps[0].step + 1)
    size = math.ceil(ran / most)
    columns: list[list[Step]] = [[] for _ in range(math.ceil(ran / size))]
    for step in steps:
        columns[min(max(0, (step.step - first) // size), len(columns) - 1)].append(step)
    return list(itertools.accumulate(columns, lambda before, column: column or before[-1:]))


def _level(scale: float) -> int:
    """Return log2 of the scale, rounded, within float32's range."""
    largest = math.ldexp(1.0, HIGHEST_LEVEL)
    return max(LOWEST_LEVEL, round(math.log2(min(scale, largest)))) if scale > 0.0 else LOWEST_LEVEL


def _level_cell(steps: Sequence[Step], top: int, bottom: int) -> str:
    levels = [_level(step.scale) for step in steps]
    if min(levels) > top or max(levels) < bottom:
        return " "
    return "━" if bottom <= min(levels) and max(levels) <= top else "┃"


def _ticks(steps: Sequence[Step], width: int) -> str:
    """Return the first, middle and last step under the axis, as far as they fit."""
    first, middle, last = str(steps[0].step), str((steps[0].step + steps[-1].step + 1) // 2), str(steps[-1].step)
    if len(steps) == 1 or width < len(first) + len(last) + 1:
        return first
    line = first + last.rjust(width - len(first))
    start = width // 2
    if line[start - 1 : start + len(middle) + 1].strip() or len(steps) < 5:
        return line
    return line[:start] + middle + line[start + len(middle) :]


# Where a site's values lie in FP16

LOWEST = FLOAT16.min_exponent - FLOAT16.precision + 1
"""The exponent of the smallest subnormal; values below it are lost."""

PER_CELL = 4
"""The number of exponents that share a character."""

LEVELS = "▁▂▃▄▅▆▇█"
DECADES = 6.0
"""The lowest bar level means a millionth of the values or less."""

BAR_WIDTH = 2 + 2 + (FLOAT16.max_exponent - LOWEST + 1) // PER_CELL


def exponent_bar(histogram: Exponents) -> str:
    """Draw ``lost│subnormal … largest│overflow``: higher is more values, by orders of magnitude."""
    cells = [0] * (BAR_WIDTH - 2)
    for exponent, count in enumerate(histogram.counts, start=histogram.lowest):
        cells[min(max(0, (exponent - LOWEST) // PER_CELL + 1), len(cells) - 1)] += count
    total = sum(cells)
    heights = (1.0 + math.log10(count / total) / DECADES if count else 0.0 for count in cells)
    levels = (max(0, math.ceil(height * len(LEVELS)) - 1) for height in heights)
    drawn = [LEVELS[level] if count else " " for count, level in zip(cells, levels, strict=True)]
    return f"{drawn[0]}│{''.join(drawn[1:-1])}│{drawn[-1]}"
