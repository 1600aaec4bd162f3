"""The pages of ``ampdbg explain``: the list of all codes, and all there is to know about one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ampdbg.record.explanation import SECTIONS, Explanation

from .view import Column, Page, Paragraph, Prose, Table, Words, line


def listing_page(entries: Sequence[Explanation]) -> Page:
    """The codes by family, each with its title, and how to read more."""
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
    more = Paragraph((line("What one means, how ampdbg decides it and what fixes it: ", command),))
    return Page(None, (*tables, more))


def explanation_page(entry: Explanation) -> Page:
    """One code: what it means, how it is decided, what fixes it."""
    head = Paragraph((line(Words(entry.code, "name"), f" · {entry.family}"), line(entry.title, tone="strong")))
    return Page(None, (head, *(Prose(title, getattr(entry, field)) for field, title in SECTIONS.items())))
