"""A page as Markdown for an issue on GitHub: the story open, its details folded, every name as text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence

from ampdbg.escapes import printable
from ampdbg.formats import Exponents
from ampdbg.record.findings import Finding
from ampdbg.record.pins import Form
from ampdbg.record.run import Record
from ampdbg.report import view
from ampdbg.report.formats import page_of, text
from ampdbg.report.suggestion import content

MOST_CHARACTERS = 64_000
"""GitHub takes an issue of 65,536 characters."""

MOST_IN_A_LINE = 1_000
"""A name or a message that is longer is cut."""

CHART_WIDTH = 80

HANDED_OVER: Mapping[Form, str] = {
    "diff": "The diff",
    "module": "The Python file",
    "yaml": "The lines for the config",
    "json": "The patch as JSON",
}
"""What a suggestion hands over, by its form."""

SPECIAL = re.compile(r"[\\`*_\[\]<>|~&]")
"""What Markdown takes for its own anywhere in a line; outside of ASCII it has nothing."""

AT_THE_START = re.compile(r"^(?:([#+=-])(?=[\s#+=-]|$)|(\d{1,9})([.)])(?=\s|$))")
"""What begins a heading, a quotation, an item of a list or a rule."""

# What GitHub reads once a text is rendered, so that no backslash keeps it from doing so: names of people, numbers of
# issues, emoji and formulas. A space of no width does, as tools that quote release notes have it.
MENTIONS = re.compile(r"@(?=\w)|#(?=\d)|(?<=GH-)(?=\d)|:(?=[\w+-]*[a-zA-Z+-][\w+-]*:)")
LINKS = (("://", ":\\//"), ("www.", "www\\."), ("$", "<span>$</span>"))


def write(record: Record, typed: view.Typed, look: view.Look) -> str:
    """The record's page, and its patch where there is one; the same however wide a terminal is."""
    patch = content(record)
    if patch is None or record.handover is None:
        return draw(page_of(record, typed))
    lines = tuple(patch.decode("utf-8", "replace").splitlines())
    return draw(page_of(record, typed), (view.Snippet(HANDED_OVER[record.handover.form], lines),))


def draw(page: view.Page, details: Sequence[view.Snippet] = ()) -> str:
    """The page, and after its story further ``details``, in less than :data:`MOST_CHARACTERS`."""
    head = f"### {text.SIGNS[page.headline.tone]} {escaped(page.headline.sentence)}" if page.headline else ""
    parts, left_out = [head] if head else [], []
    end = "\n\n".join(_end(page))
    room = MOST_CHARACTERS - len(head) - len(end)
    story = page.story or page.sections[:1]
    kinds = (view.Findings,) * any(isinstance(one, view.Findings) for one in story)
    folded = [section for section in page.sections if section not in story and not isinstance(section, kinds)]
    for at, section in enumerate((*story, *details, *folded)):
        is_open = at < len(story)
        again = not is_open and any(view.title(section) == view.title(one) for one in story)
        part = "\n\n".join(_section(section, ", in full" if again else "", is_open=is_open))
        if len(part) + 2 > room:
            left_out.append("findings" if isinstance(section, view.Findings) else view.title(section) or "a table")
            continue
        room -= len(part) + 2
        parts.append(part)
    if left_out:
        parts.append(escaped(f"Left out, because an issue has no room for it: {', '.join(left_out)[:MOST_IN_A_LINE]}."))
    return "\n\n".join(part for part in (*parts, end) if part) + "\n"


def _end(page: view.Page) -> Iterator[str]:
    if page.next_command is not None:
        yield f"**Next:** {escaped(page.next_command.why)}"
        if page.next_command.command:
            yield _fenced([page.next_command.command], "sh")
    footer = [*page.footer, *([f"Record: {page.record_path}"] if page.record_path else [])]
    if footer:
        yield "<sub>" + "<br>".join(map(escaped, footer)) + "</sub>"


def _section(section: view.Section, more: str, *, is_open: bool) -> Iterator[str]:
    if isinstance(section, view.Findings):
        yield from _findings(section.findings)
        return
    body = "\n\n".join(_drawn(section))
    if is_open:
        yield f"**{escaped(section.title)}**\n\n{body}" if section.title else body
    else:
        # The tags' line is no Markdown: a backslash there would be shown.
        yield f"<details><summary>{MENTIONS.sub(_apart, html.escape(section.title + more)) or 'Also'}</summary>"
        yield body
        yield "</details>"


def _drawn(section: view.Section) -> Iterator[str]:
    match section:
        case view.Paragraph():
            yield _lines(section.lines)
        case view.Snippet():
            yield _fenced(section.lines, "diff" if any(one.startswith("+++ ") for one in section.lines) else "")
        case view.ScaleChart():
            yield _fenced([row.text for row in text.scale_chart(section.steps, CHART_WIDTH)])
        case view.Table():
            yield from (_lines(lines) for lines in (section.above,) if lines)
            if section.columns:
                heads = ["2^-24 … 2^15" if one.kind == "histogram" else escaped(one.heading) for one in section.columns]
                rule = ["---:" if one.kind in view.RIGHT else "---" for one in section.columns]
                rows = ([*map(_cell, row)] for row in section.rows)
                yield "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))
            yield from (_lines(lines) for lines in (section.below,) if lines)
        case view.Prose():
            yield section.markdown


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Every finding without a root, with what follows from it as a list."""
    for finding, effects in view.with_effects(findings):
        yield from _finding(finding)
        follows = ((view.conjunction(finding, one), one) for one in effects)
        lines = [f"- {joined} <code>{escaped(one.code)}</code> at step {one.step}: " for joined, one in follows]
        said = (f"{line}{escaped(one.message)}" for line, one in zip(lines, effects, strict=True))
        yield from ["\n".join(said)] * bool(effects)


def _finding(finding: Finding) -> Iterator[str]:
    where = [finding.at_step, finding.phase, *(part for part in (finding.module, finding.op) if part)]
    yield f"**{finding.severity} <code>{escaped(finding.code)}</code>** · {' · '.join(map(escaped, where))}"
    yield escaped(finding.message)
    for before, source in view.places(finding):
        at = f"<code>{escaped(f'{source.file}:{source.line}')}</code> in <code>{escaped(source.function)}</code>"
        yield f"{before}{at}"
        yield _fenced([source.text.strip()], "python")
    if finding.remedy:
        yield f"**Remedy:** {escaped(finding.remedy)}"


def _lines(lines: Sequence[view.StyledLine]) -> str:
    return "<br>\n".join("&emsp;" * one.depth + _line(one) for one in lines)


def _line(one: view.StyledLine) -> str:
    said = "".join(_words(words) for words in one.words)
    return f"<code>{said}</code>" if one.is_code and said else said


def _words(words: view.Words) -> str:
    inner = words.text.strip()
    if inner and inner != words.text:  # what stands between words is no part of a name
        first, last = (" " if char.isspace() else "" for char in (words.text[0], words.text[-1]))
        return f"{first}{_words(view.Words(inner, words.tone))}{last}"
    said = escaped(words.text)
    if words.tone == "name" and said.strip():
        return f"<code>{said}</code>"
    return f"**{said}**" if words.tone == "strong" and said and said == said.strip() else said


def _cell(cell: view.Cell) -> str:
    if isinstance(cell, Exponents):
        return f"<code>{text.exponent_bar(cell).replace(' ', '&nbsp;')}</code>"
    if isinstance(cell, str):
        return escaped(cell)
    return _line(cell) if isinstance(cell, view.StyledLine) else "<br>".join(map(_line, cell))


def _fenced(lines: Sequence[str], language: str = "") -> str:
    """Lines as they stand; the fence is longer than any that they hold."""
    shown = [printable(one, but="\t") for one in lines]
    longest = max((len(run) for one in shown for run in re.findall(r"`+", one)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join((f"{fence}{language}", *shown, fence))


def escaped(said: str) -> str:
    """A text that a reader of Markdown shows as it is: no markup, no link, nobody mentioned."""
    cut = said if len(said) <= MOST_IN_A_LINE else said[: MOST_IN_A_LINE - 1] + "…"
    shown = SPECIAL.sub(r"\\\g<0>", " ".join(cut.splitlines()))
    shown = AT_THE_START.sub(lambda found: f"{found[2] or ''}\\{found[1] or found[3]}", shown.lstrip())
    for what, instead in LINKS:
        shown = shown.replace(what, instead)
    return MENTIONS.sub(_apart, shown)


def _apart(found: re.Match[str]) -> str:
    return f"{found[0]}&#8203;"
