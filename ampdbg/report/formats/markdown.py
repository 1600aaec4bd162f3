"""A page as Markdown for an issue on GitHub: the story open, its details folded, every name as text."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ampdbg.escapes import printable
from ampdbg.record.run import Record
from ampdbg.report import view
from ampdbg.report.formats import page_of, text
from ampdbg.report.suggestion import FORMS, content

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_CHARACTERS = 64_000
"""GitHub takes an issue of 65,536 characters."""

MOST_IN_A_LINE = 1_000
"""A longer name or message is cut."""

CHART_WIDTH = 80

SPECIAL = re.compile(r"[\\`*_\[\]<>|~&]")
"""Characters that are markup anywhere in a line of Markdown; outside of ASCII there are none."""

AT_THE_START = re.compile(r"^(?:([#+=-])(?=[\s#+=-]|$)|(\d{1,9})([.)])(?=\s|$))")
"""Text that begins a heading, a quotation, an item of a list or a rule."""

# GitHub reads these after it has rendered a text, so a backslash does not stop it: names of people, numbers of issues,
# emoji and formulas. A space of zero width does, as in tools that quote release notes.
MENTIONS = re.compile(r"@(?=\w)|#(?=\d)|(?<=GH-)(?=\d)|:(?=[\w+-]*[a-zA-Z+-][\w+-]*:)")
LINKS = (("://", ":\\//"), ("www.", "www\\."), ("$", "<span>$</span>"))


def write(record: Record, typed: view.CommandContext, look: view.Look) -> str:
    """Return the record's page, and its patch if there is one; the same for any width of the terminal."""
    patch = content(record)
    if patch is None or record.handover is None:
        return draw(page_of(record, typed))
    lines = tuple(patch.decode("utf-8", "replace").splitlines())
    return draw(page_of(record, typed), (view.Snippet(FORMS[record.handover.form].called, lines),))


def draw(page: view.Page, details: Sequence[view.Snippet] = ()) -> str:
    """Return the page, with further ``details`` after its story, in less than :data:`MOST_CHARACTERS`."""
    parts: Any = _templates().get_template("markdown.jinja").module
    head = f"### {text.SIGNS[page.headline.tone]} {escaped(page.headline.sentence)}" if page.headline else ""
    drawn, left_out = [head], []
    end = parts.end(page).rstrip("\n")
    room = MOST_CHARACTERS - len(head) - len(end)
    story = page.story or page.sections[:1]
    kinds = (view.Findings,) * any(isinstance(one, view.Findings) for one in story)
    folded = [section for section in page.sections if section not in story and not isinstance(section, kinds)]
    for at, section in enumerate((*story, *details, *folded)):
        is_open, title = at < len(story), section.title
        is_again = not is_open and title in [one.title for one in story]
        part = parts.section(section, ", in full" * is_again, is_open).rstrip("\n")
        if len(part) + 2 > room:
            left_out.append("findings" if isinstance(section, view.Findings) else title or "a table")
            continue
        room -= len(part) + 2
        drawn.append(part)
    said = f"Left out, because an issue has no room for it: {', '.join(left_out)[:MOST_IN_A_LINE]}."
    return "\n\n".join(part for part in (*drawn, escaped(said) * bool(left_out), end) if part) + "\n"


@functools.cache
def _templates() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    loader = FunctionLoader(lambda name: files(__package__ or "").joinpath(name).read_text("utf-8"))
    templates = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    filters: dict[str, Callable[..., Any]] = {
        "bar": text.exponent_bar,
        "chart": lambda one: [row.text for row in text.scale_chart(one.steps, CHART_WIDTH)],
        "escaped": escaped,
        "fenced": _fenced,
        "kind": lambda one: type(one).__name__,
        # The line of a tag is not Markdown: a backslash there would be shown.
        "summary": lambda said: MENTIONS.sub(_apart, html.escape(said)),
        "without_end": lambda said: said.rstrip("\n"),
        "words": _words,
    }
    templates.filters |= filters
    templates.tests["is_new_file"] = lambda one: one.startswith("+++ ")
    templates.globals |= {"places": view.places, "conjunction": view.conjunction, "with_effects": view.with_effects}
    templates.globals["right"] = view.RIGHT
    return templates


def _words(words: view.Words) -> str:
    inner = words.text.strip()
    if inner and inner != words.text:  # the space around words is not part of a name
        first, last = (" " if char.isspace() else "" for char in (words.text[0], words.text[-1]))
        return f"{first}{_words(view.Words(inner, words.tone))}{last}"
    said = escaped(words.text)
    if words.tone == "name" and said.strip():
        return f"<code>{said}</code>"
    return f"**{said}**" if words.tone == "strong" and said and said == said.strip() else said


def _fenced(lines: Sequence[str], language: str = "") -> str:
    """Return lines unchanged, in a fence that is longer than any fence in them."""
    shown = [printable(one, but="\t") for one in lines]
    longest = max((len(run) for one in shown for run in re.findall(r"`+", one)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join((f"{fence}{language}", *shown, fence))


def escaped(said: str) -> str:
    """Escape a text so that Markdown shows it as it is: no markup, no link, no mention."""
    cut = said if len(said) <= MOST_IN_A_LINE else said[: MOST_IN_A_LINE - 1] + "…"
    shown = SPECIAL.sub(r"\\\g<0>", " ".join(cut.splitlines()))
    shown = AT_THE_START.sub(lambda found: f"{found[2] or ''}\\{found[1] or found[3]}", shown.lstrip())
    for what, instead in LINKS:
        shown = shown.replace(what, instead)
    return MENTIONS.sub(_apart, shown)


def _apart(found: re.Match[str]) -> str:
    return f"{found[0]}&#8203;"
