"""The output formats of a record: a page for each command, and a module of this folder for each format."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

from ampdbg.escapes import harmless
from ampdbg.record.run import Record
from ampdbg.report.view import CommandContext, Look, Page

FORMATS = tuple(module.name for module in pkgutil.iter_modules(__path__))
"""The values of ``ampdbg report --format``: the modules of this folder, each with a function ``write``."""


def written(record: Record, typed: CommandContext, look: Look, format_: str) -> str:
    """Return the record in one of :data:`FORMATS`."""
    text: str = importlib.import_module(f".{format_}", __name__).write(record, typed, look)
    return text


def page_of(record: Record, typed: CommandContext) -> Page:
    """Return the page of a record, by the command that made it.

    All text from the user is made harmless; only a command to copy keeps its paths.
    """
    from ampdbg.report import bisection, cost, ranges, scan, suggestion

    pages = {"bisect": bisection.page, "suggest-fp32": suggestion.page, "ranges": ranges.page, "cost": cost.page}
    page = pages.get(record.command, scan.page)(record, typed)
    return replace(harmless(page, typed.folder), next_command=harmless(page.next_command))
