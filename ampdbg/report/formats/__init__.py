"""What a record is written as: one page a command, and a module of this folder for each format, with its ``write``."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

from ampdbg.escapes import harmless
from ampdbg.record.run import Record
from ampdbg.report.view import Look, Page, Typed

FORMATS = tuple(module.name for module in pkgutil.iter_modules(__path__))
"""What ``ampdbg report --format`` takes: the modules of this folder."""


def written(record: Record, typed: Typed, look: Look, format_: str) -> str:
    """The record in one of :data:`FORMATS`."""
    text: str = importlib.import_module(f".{format_}", __name__).write(record, typed, look)
    return text


def page_of(record: Record, typed: Typed) -> Page:
    """The page of a record, by the command that made it.

    All text of the user's world is harmless; only a command to copy keeps its paths as they are.
    """
    from ampdbg.report import bisection, cost, ranges, scan, suggestion

    pages = {"bisect": bisection.page, "suggest-fp32": suggestion.page, "ranges": ranges.page, "cost": cost.page}
    page = pages.get(record.command, scan.page)(record, typed)
    return replace(harmless(page, typed.folder), next_command=harmless(page.next_command))
