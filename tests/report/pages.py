"""Pages as text, as a command prints them."""

from __future__ import annotations

from typing import Literal

from ampdbg.record.run import Record
from ampdbg.report.formats.text import write
from ampdbg.report.view import CommandContext, Look


def rendered(
    record: Record,
    *,
    width: int = 80,
    color: bool = False,
    unicode: bool = True,
    config: str = "config.yaml",
    record_path: str = ".ampdbg/r.json",
    folder: str = "/home/me",
    order: Literal["tightest", "execution"] = "tightest",
    top: int | None = None,
    verbose: bool = True,
) -> str:
    """The record's page for a terminal with this look; only its story if not ``verbose``."""
    typed = CommandContext(config, record_path, folder, order, top, verbose=verbose)
    return write(record, typed, Look(width, color, unicode))
