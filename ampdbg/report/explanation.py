"""The explanations of codes, read from the Markdown files of ``ampdbg/record/explanations/``, and their pages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ampdbg.errors import AmpdbgError
from ampdbg.record.codes import CODES

from .view import Column, Page, Paragraph, Prose, Table, Words, line

SECTIONS: Mapping[str, str] = {
    "meaning": "What it means",
    "decision": "How it is decided",
    "remedy": "What fixes it",
    "alike": "What looks alike",
    "case": "A known case",
}
"""The sections of an explanation: field of :class:`Explanation`, and heading in its file."""


@dataclass(frozen=True)
class Explanation:
    """The explanation of one code; the sections are Markdown: paragraphs, lists with ``-``, fenced code.

    The decision begins with the conditions of the table that the diagnosis itself uses.
    """

    code: str
    family: str
    title: str
    meaning: str
    decision: str
    remedy: str
    alike: str
    case: str


def explanation(code: str) -> Explanation:
    """Read the explanation of ``code``; raise AmpdbgError, which suggests similar codes, if there is none."""
    if code not in CODES:
        raise AmpdbgError(f"{code!r} is not a code; {_suggestion(code)}")
    from importlib import resources  # 5 ms that `ampdbg --help` does not need

    from ampdbg.diagnosis.diagnose import conditions_of  # 5 ms more, for the table

    file = resources.files("ampdbg") / "record" / "explanations" / f"{code}.md"
    title, *parts = file.read_text(encoding="utf-8").removeprefix("# ").split("\n## ")
    bodies = {heading: body.strip() for heading, _, body in (part.partition("\n") for part in parts)}
    conditions = "".join(f"- {when[0].upper()}{when[1:]}.\n" for when in conditions_of(code))
    bodies[SECTIONS["decision"]] = f"{conditions}\n{bodies[SECTIONS['decision']]}".strip()
    sections = {field: bodies[heading] for field, heading in SECTIONS.items()}
    return Explanation(code, CODES[code].family, title.strip(), **sections)


def explanations() -> tuple[Explanation, ...]:
    """Return all explanations, in the order of the catalog."""
    return tuple(map(explanation, CODES))


def _suggestion(given: str) -> str:
    wanted = given.strip().lower().replace("_", "-").replace(" ", "-")
    words = sorted({word for code in CODES for word in code.split("-")})
    kind = difflib.get_close_matches(wanted, words, n=1, cutoff=0.8)
    holding = [code for code in CODES for word in kind if word in code.split("-")]
    holding = holding or [code for code in CODES if len(wanted) > 2 and wanted in code]
    near = holding or difflib.get_close_matches(wanted, CODES, n=1, cutoff=0.5)
    return f"did you mean {' or '.join(near)}? All codes: ampdbg explain" if near else "all codes: ampdbg explain"


def listing_page(entries: Sequence[Explanation]) -> Page:
    """Return a page of the codes by family, each with its title, and how to read more."""
    longest = max(len(entry.code) for entry in entries)
    tables = (
        Table(
            family,
            (Column(kind="sign"), Column()),
            tuple((line(entry.code.ljust(longest), tone="name"), entry.title) for entry in members),
        )
        for family, members in groupby(entries, key=lambda entry: entry.family)
    )
    command = Words("ampdbg explain CODE", "name")
    more = Paragraph((line("What a code means, how ampdbg decides it and what fixes it: ", command),))
    return Page(None, (*tables, more))


def explanation_page(entry: Explanation) -> Page:
    """Return the page of one code: its meaning, its decision and its remedy."""
    head = Paragraph((line(Words(entry.code, "name"), f" · {entry.family}"), line(entry.title, tone="strong")))
    return Page(None, (head, *(Prose(title, getattr(entry, field)) for field, title in SECTIONS.items())))
