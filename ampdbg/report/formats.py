"""What a record is written as: one page a command, one entry a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdbg.escapes import harmless
from ampdbg.record.file import to_json
from ampdbg.record.run import Record

from .view import Look, Page, Typed

if TYPE_CHECKING:
    from .suggestion import PatchFacts


def page_of(record: Record, typed: Typed) -> Page:
    """The page of a record, by the command that made it.

    The patch itself is no part of a record: of a suggestion the page shows the search and the proof.
    """
    from . import bisection, ranges, scan

    pages = {"bisect": bisection.page, "suggest-fp32": bisection.page, "ranges": ranges.page}
    return _harmless(pages.get(record.command, scan.page)(record, typed), typed.folder)


def _harmless(page: Page, folder: str) -> Page:
    """The page with all text of the user's world harmless; a command to copy keeps its paths as they are."""
    return replace(harmless(page, folder), next_command=harmless(page.next_command))


def as_text(record: Record, typed: Typed, look: Look) -> str:
    """The record's page for a terminal."""
    from .text import draw

    return draw(page_of(record, typed), look)


def suggestion_text(record: Record, patch: PatchFacts, typed: Typed, look: Look) -> str:
    """The page beside a patch, of which the record alone does not know all."""
    from .suggestion import page
    from .text import draw

    return draw(_harmless(page(record, typed, patch), typed.folder), look)


def as_json(record: Record, typed: Typed, look: Look) -> str:
    """The record itself."""
    return to_json(record)


FORMATS: Mapping[str, Callable[[Record, Typed, Look], str]] = {"text": as_text, "json": as_json}
"""What ``ampdbg report --format`` takes; a new format is an entry here, and a module that draws a page."""
